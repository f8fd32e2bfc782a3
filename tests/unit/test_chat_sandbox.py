"""Chat templates that are broken or mean harm: one error each, in a bounded time."""

import errno
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlx_engine.errors import ChatTemplateError, TokenizerError
from mlx_engine.tokenizer import chat, load_tokenizer, sandbox, sandbox_process
from mlx_engine.tokenizer.chat import Limits, chat_ids
from mlx_engine.tokenizer.chat_prompt import ChatPrompt
from mlx_engine.tokenizer.sandbox_process import DEFAULT_LIMITS, SandboxProcess
from tests.golden.goldens import DATA
from tests.patience import PATIENCE, wait_for
from tests.unit.test_chat import chatml, user
from tests.unit.test_tokenizer import build, byte_level

ROOT = Path(__file__).parents[2]

# ---- templates that mean harm, or are broken ----

BROKEN = {
    "refusal": "{{ raise_exception('System role not supported') }}",
    "words for the terminal": "{{ raise_exception('one\\n\\x1b[2Jtwo') }}",
    "syntax": "{% for m in messages %}",
    "no such attribute": "{{ messages[0].a.b }}",
    "python's own": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "python's own in a namespace": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ messages[0].content }}",
    "changed messages": "{{ messages.append(1) }}",
    "a file": "{% include '/etc/passwd' %}",
    "a long range": "{% for i in range(10**9) %}x{% endfor %}",
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "much text": "{% for i in range(2000) %}" + "x" * 1000 + "{% endfor %}",
    "deep": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "not utf-8": "a\udcffb",
}
SLOW = {
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a large power": "{{ 10 ** (10 ** 10) }}",
}
LARGE = {
    "repetition": "{{ 'x' * 10 ** 11 }}",
    "doubling": "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "padding": "{{ 'x' | center(10 ** 11) }}",
}


def refused(template, seconds=PATIENCE):
    tokenizer = build(byte_level(chat_template=template))
    with pytest.raises(ChatTemplateError) as caught:
        chat_ids(tokenizer, user("x"), limits=Limits(seconds=seconds, characters=1_000_000))
    message = str(caught.value)
    assert message.startswith("toy: expected a chat template")
    assert len(message.splitlines()) == 1
    assert len(message) < 800
    assert message.isprintable()
    return message


@pytest.mark.some(3)
@pytest.mark.parametrize("name", BROKEN)
def test_a_template_that_fails_is_one_error(name):
    message = refused(BROKEN[name])
    if name == "refusal":
        assert "System role not supported" in message
    if name == "much text":
        assert "writes more than 1,0" in message


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no bounds on processor time")
@pytest.mark.parametrize("name", SLOW)
def test_a_template_that_takes_too_long_is_ended(name):
    assert "over 0.3 seconds" in refused(SLOW[name], seconds=0.3)


@pytest.mark.some(1)
@pytest.mark.skipif(sys.platform != "linux", reason="no bounds on memory")
@pytest.mark.parametrize("name", LARGE)
def test_a_template_that_takes_too_much_memory_is_ended(name):
    assert "Memory" in refused(LARGE[name])


def test_a_sandbox_that_cannot_be_started_is_one_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert "/no/such/python" in refused("x")


@pytest.mark.parametrize("executable", [None, "", "/no/such/python"])
def test_without_python_a_tokenizer_file_is_not_blamed(monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(TokenizerError, match=r"no process: .* start.*; the tokenizer needs a process of its own"):
        load_tokenizer(DATA / "gpt2-micro" / "hf")


def test_a_sandbox_that_does_not_come_back_is_ended(monkeypatch, tmp_path):
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(sandbox, "__file__", str(tmp_path / "sleeps.py"))
    monkeypatch.setattr(sandbox_process, "START_SECONDS", 0)
    tokenizer = chatml()
    with pytest.raises(ChatTemplateError, match="over 0"):
        chat_ids(tokenizer, user("x"), limits=Limits(seconds=0.1))


def test_a_sandbox_that_crashes_says_its_last_word(monkeypatch, tmp_path):
    (tmp_path / "fails.py").write_text("raise SystemExit('no room\\n')")
    monkeypatch.setattr(sandbox, "__file__", str(tmp_path / "fails.py"))
    assert "no room" in refused("x")


# ---- one process for many conversations ----


def pid(tokenizer):
    return tokenizer.sandbox._process.pid


def is_alive(number):
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def test_conversations_share_a_process_and_nothing_else():
    counts = "{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ messages[0].content }}"
    tokenizer = build(byte_level(chat_template=counts))
    texts = [(tokenizer.decode(chat_ids(tokenizer, user(text))), pid(tokenizer)) for text in "abc"]
    assert [text for text, _ in texts] == ["1a", "1b", "1c"]
    assert len({number for _, number in texts}) == 1


REFUSES = (
    "{% if messages[0].content == 'no' %}{{ raise_exception('no') }}{% endif %}"
    "{% if messages[0].content == 'bad' %}{{ messages[0].a.b }}{% endif %}{{ messages[0].content }}"
)


def test_a_failure_ends_the_process_and_the_next_conversation_has_another():
    tokenizer = build(byte_level(chat_template=REFUSES))
    chat_ids(tokenizer, user("a"))
    before = pid(tokenizer)
    with pytest.raises(ChatTemplateError, match="a failure: TemplateError: no"):
        chat_ids(tokenizer, user("no"))
    assert tokenizer.decode(chat_ids(tokenizer, user("a"))) == "a"
    assert pid(tokenizer) == before  # messages that the template refuses are no failure of the process
    with pytest.raises(ChatTemplateError, match="a failure: UndefinedError"):
        chat_ids(tokenizer, user("bad"))
    assert not is_alive(before)
    assert tokenizer.decode(chat_ids(tokenizer, user("a"))) == "a"
    assert pid(tokenizer) != before


def test_inputs_that_a_template_fails_on_do_not_end_the_process_that_asks_for_each():
    tokenizer = build(byte_level(chat_template=REFUSES))
    chat_ids(tokenizer, user("a"))
    before = pid(tokenizer)
    prompts = [ChatPrompt(user(text)) for text in ("a", "no", "bad", "b")]
    assert chat.render_each(tokenizer, prompts) == ["a", None, None, "b"]
    assert pid(tokenizer) == before
    with pytest.raises(ChatTemplateError, match="writes more than 2"):
        chat.render_each(build(byte_level(chat_template=BROKEN["much text"])), prompts)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_process_that_somebody_ended_is_replaced():
    tokenizer = chatml()
    want = chat_ids(tokenizer, user("x"))
    before = pid(tokenizer)
    os.kill(before, signal.SIGKILL)
    tokenizer.sandbox._process.wait()
    assert chat_ids(tokenizer, user("x")) == want
    assert pid(tokenizer) != before


def test_a_process_has_a_limited_number_of_uses(monkeypatch):
    monkeypatch.setattr(sandbox_process, "MAX_USES", 2)
    tokenizer = chatml()
    numbers = []
    for _ in range(3):
        chat_ids(tokenizer, user("x"))
        numbers.append(tokenizer.sandbox._process and pid(tokenizer))
    assert numbers[0] is not None
    assert numbers[1] is None
    assert numbers[2] not in (None, numbers[0])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no bounds on processor time")
def test_the_time_of_one_conversation_is_not_taken_from_the_next():
    tokenizer = build(byte_level(chat_template="{% for i in range(99999) %}{% endfor %}x"))
    chat_ids(tokenizer, user("x"))
    before = pid(tokenizer)
    while process_seconds(before) < 0.25:
        chat_ids(tokenizer, user("x"), limits=Limits(seconds=0.15))
    assert pid(tokenizer) == before


def process_seconds(number):
    """CPU time of a process; where the system does not say, enough."""
    path = Path(f"/proc/{number}/stat")
    if not path.is_file():
        return 1.0
    user_ticks, system_ticks = path.read_text().rpartition(")")[2].split()[11:13]
    return (int(user_ticks) + int(system_ticks)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_threads_get_their_own_answers():
    tokenizer = chatml()
    contents = [f"{i} hello" * (1 + 5000 * (i % 2)) for i in range(12)]
    want = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in contents]
    with ThreadPoolExecutor(8) as threads:
        found = threads.map(lambda text: tokenizer.decode(chat_ids(tokenizer, user(text))), contents)
        assert list(found) == want


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_its_own():
    tokenizer = chatml()
    want = chat_ids(tokenizer, user("x"))
    before = pid(tokenizer)
    with tokenizer.sandbox._lock:  # as if another thread were asking
        child = os.fork()
        if child == 0:
            signal.alarm(int(PATIENCE))
            is_same = chat_ids(tokenizer, user("x")) == want
            other = pid(tokenizer)
            tokenizer.sandbox._stop()
            os._exit(0 if is_same and other != before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert chat_ids(tokenizer, user("x")) == want
    assert pid(tokenizer) == before


@pytest.mark.slow
def test_a_tokenizer_that_is_dropped_ends_its_process():
    tokenizer = chatml()
    chat_ids(tokenizer, user("x"))
    number = pid(tokenizer)
    assert is_alive(number)
    del tokenizer
    gc.collect()
    assert not is_alive(number)


@pytest.mark.slow
def test_the_process_ends_at_exit_and_when_its_parent_is_killed():
    program = """
import os, sys
from mlx_engine.tokenizer.sandbox_process import DEFAULT_LIMITS, SandboxProcess
sandbox = SandboxProcess()
request = {"template": "x", "inputs": [{}], "names": {}}
assert sandbox.ask(request, DEFAULT_LIMITS, "toy") == ["x"]
print(sandbox._process.pid, flush=True)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), 9)
"""
    for how in ("exit", "kill"):
        run = subprocess.run(
            [sys.executable, "-c", program, how], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert run.returncode == (-9 if how == "kill" else 0), run.stderr
        wait_for(lambda number=int(run.stdout): not is_alive(number))


# ---- what code could do that gets out of Jinja's sandbox ----


def said_inside(tmp_path, code):
    """Return what `code` prints in a sandbox process, which imports it as Jinja."""
    package = tmp_path / "jinja2"
    package.mkdir()
    inside = f"with contextlib.redirect_stdout(said):\n{textwrap.indent(textwrap.dedent(code), '    ')}"
    before, after = "import io, contextlib\nsaid = io.StringIO()", "raise SystemExit(' '.join(said.getvalue().split()))"
    (package / "__init__.py").write_text("\n".join([before, inside, after]))
    process = SandboxProcess()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(tmp_path), *sys.path])
        with pytest.raises(ChatTemplateError) as caught:
            process.ask({"template": "x", "inputs": [{}], "names": {}}, DEFAULT_LIMITS, "toy")
    return caught.value.found


def test_the_environment_is_not_inherited(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_ENGINE_API_KEY", "secret")
    monkeypatch.setenv("TZ", "UTC")
    found = said_inside(tmp_path, "import os\nprint(dict(os.environ))")
    assert "'TZ': 'UTC'" in found
    assert "secret" not in found
    assert "PATH'" not in found


@pytest.mark.skipif(os.name != "posix", reason="no limits")
def test_no_other_process_is_started(tmp_path):
    code = """
    import os
    if os.getuid() == 0:
        os.setuid(65534)  # the limit does not hold for root
    for start in (os.fork, lambda: os.posix_spawn("/bin/true", ["true"], {})):
        try:
            start()
            print("started")
        except OSError as error:
            print("refused", error.errno)
    """
    found = said_inside(tmp_path, code)
    assert found.count(f"refused {errno.EAGAIN}") == 2, found


@pytest.mark.skipif(os.name != "posix", reason="no limits")
def test_no_file_is_written_and_few_are_open(tmp_path):
    code = f"""
    import os
    try:
        with open({str(tmp_path / "new")!r}, "w") as file:
            file.write("x")
    except OSError as error:
        print("refused", error.errno)
    import resource
    opened = []
    try:
        while True:
            opened.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        print(len(opened), "opened", error.errno)
    for name in ("NPROC", "NOFILE", "FSIZE", "CORE"):
        print(name, resource.getrlimit(getattr(resource, "RLIMIT_" + name)))
    """
    found = said_inside(tmp_path, code)
    assert f"refused {errno.EFBIG}" in found
    assert int(re.search(r"(\d+) opened", found)[1]) < 16
    assert f"opened {errno.EMFILE}" in found
    assert "NPROC (0, 0) NOFILE (16, 16) FSIZE (0, 0) CORE (0, 0)" in found
    assert (tmp_path / "new").read_text() == ""


@pytest.mark.skipif(os.name != "posix", reason="descriptors")
def test_no_descriptor_is_inherited(tmp_path):
    reading, writing = os.pipe()
    try:
        os.set_inheritable(writing, True)
        code = """
        import os
        for fd in range(3, 256):
            try:
                os.fstat(fd)
                print("open", fd)
            except OSError:
                pass
        print("looked")
        """
        found = said_inside(tmp_path, code)
    finally:
        os.close(reading)
        os.close(writing)
    assert "looked" in found
    assert "open" not in found
