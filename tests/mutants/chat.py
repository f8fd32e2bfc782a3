"""Mutants of conversations: messages, markers, ids that are kept, the sandbox process, and the command `chat`."""

from tests.mutants.plant import Mutant

CHAT, MARKERS, HISTORY = (f"mlx_engine/tokenizer/{name}.py" for name in ("chat", "markers", "history"))
MESSAGES, PROCESS = "mlx_engine/tokenizer/chat_prompt.py", "mlx_engine/tokenizer/sandbox_process.py"
CONVERSATION, COMMAND = "mlx_engine/conversation.py", "mlx_engine/commands/chat.py"
RUN = "stream = self.engine.run(ids, options, progress=progress, scheduler=self._scheduler() if options.kv else None)"

PROMPT, THINKING = (f"mlx_engine/tokenizer/{name}.py" for name in ("chat_prompt", "thinking"))

MUTANTS = [
    Mutant(
        "tools make markers",
        PROMPT,
        "TemplateInput.map_texts",
        "map_values(self.tools, change)",
        "self.tools",
    ),
    Mutant(
        "variables make markers",
        PROMPT,
        "TemplateInput.map_texts",
        "map_values(value, change)",
        "value",
    ),
    Mutant(
        "variables that no template reads pass",
        PROMPT,
        "_check_variables",
        "NAME.fullmatch(name) is not None and reads(template, name)",
        "NAME.fullmatch(name) is not None",
    ),
    Mutant(
        "a marker that is cut is text",
        THINKING,
        "Reasoning._think",
        "len(text) if is_end else len(text) - _overlap(text, closing)",
        "len(text)",
    ),
    Mutant(
        "reasoning stays in the content",
        CONVERSATION,
        "Conversation._message",
        '{"content": said, "reasoning_content": thought} if thought else {}',
        "{}",
    ),
    Mutant(
        "what a message spells is a marker",
        MARKERS,
        "Markers.encode",
        "self.among(ids) == self.written(marked)",
        "True",
    ),
    Mutant(
        "a message's marker stands for the template's",
        CHAT,
        "_rendered",
        'marked.replace(MARK, "") == plain or any(text in said for text in tokenizer.special_tokens if text)',
        'marked.replace(MARK, "") == plain',
    ),
    Mutant("a normaliser makes a marker of a message", MARKERS, "_without", "len(text) < 2", "True"),
    Mutant(
        "markers that are put together are a message's",
        MARKERS,
        "Markers.of.is_written",
        "any(all(part in template for part in around) for around in parts)",
        "False and any(all(part in template for part in around) for around in parts)",
    ),
    Mutant("half of a marker may be a message's", CHAT, "_rendered", "(text[0], text[-1])", "(text[0],)"),
    Mutant(
        "markers that any text may have are a message's",
        MARKERS,
        "Markers.of",
        "tokenizer.special_tokens | always",
        "tokenizer.special_tokens",
    ),
    Mutant(
        "what a message hid stays hidden",
        CHAT,
        "_rendered",
        "_replaced(markers.mark(guarded), [(stand_in, end) for end, stand_in in hidden])",
        "markers.mark(guarded)",
    ),
    Mutant(
        "keys of arguments are trusted",
        MESSAGES,
        "_map",
        "{change(key): _map(item, change, is_data=True) for key, item in value.items()}",
        "{key: _map(item, change, is_data=True) for key, item in value.items()}",
    ),
    Mutant(
        "types in arguments are trusted",
        MESSAGES,
        "_map",
        "{change(key): _map(item, change, is_data=True) for key, item in value.items()}",
        "{change(key): item if key == 'type' else _map(item, change, is_data=True) for key, item in value.items()}",
    ),
    Mutant("names are trusted", MESSAGES, "map_texts", 'key == "role"', 'key in ("role", "name")'),
    Mutant(
        "any role is trusted",
        MESSAGES,
        "_check",
        "isinstance(role, str) and ROLE.fullmatch(role) is not None",
        "isinstance(role, str)",
    ),
    Mutant(
        "ids continue in the middle of a section",
        HISTORY,
        "History.beginnings",
        "marked.startswith(text) and marked.startswith(MARK, len(text))",
        "marked.startswith(text)",
    ),
    Mutant(
        "the shortest beginning counts",
        HISTORY,
        "History.beginnings",
        "sorted(found, key=lambda entry: len(entry[0]), reverse=True)",
        "sorted(found, key=lambda entry: len(entry[0]))",
    ),
    Mutant(
        "markers of an answer are text",
        HISTORY,
        "History._marked",
        "piece.removesuffix(marker) + MARK + marker if marker else piece",
        "piece",
    ),
    Mutant(
        "every answer ends as the model ended it",
        HISTORY,
        "History.add_answer",
        "generated.pop()",
        "break",
    ),
    Mutant(
        "a history grows without end", HISTORY, "History._add", "self._n_bytes -= len(dropped)", "self._n_bytes = 0"
    ),
    Mutant(
        "a process that has ended is asked",
        PROCESS,
        "SandboxProcess._running",
        "self._process is not None and self._process.poll() is None",
        "self._process is not None",
    ),
    Mutant("a process lives for ever", PROCESS, "SandboxProcess.exchange", "self._uses >= max_uses", "False"),
    Mutant("a fork shares the process", PROCESS, "_forget_all", "process._forget()", "pass"),
    Mutant("threads share an answer", PROCESS, "SandboxProcess.exchange", "with self._lock: ...", "if True:\n    ..."),
    Mutant(
        "a failed question stays",
        CONVERSATION,
        "Conversation._answer",
        f"{RUN}\nself._replace(messages)",
        f"self._replace(messages)\n{RUN}",
    ),
    Mutant(
        "generated ids are forgotten",
        CONVERSATION,
        "Conversation._keep",
        "self._history.add_answer(generation.prompt_ids, generation.token_ids)",
        "pass",
    ),
    Mutant("Ctrl-C is not looked at", COMMAND, "print_pieces", "stop.is_set()", "False"),
]
