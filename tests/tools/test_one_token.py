"""The count of files and functions that one greedy token enters."""

from tools.one_token import entered

# A reader who follows one token opens so many files and reads so many functions. Lower them when the path gets simpler.
MOST_FILES, MOST_FUNCTIONS = 21, 112


def test_one_token_enters_few_files_and_the_loop_is_among_them():
    found = entered("builtin", "parallel")
    files = {file for file, _ in found}
    assert {"mlx_engine/loop/scheduler.py", "mlx_engine/loop/runner.py", "mlx_engine/models/decoder.py"} <= files
    assert all(file.startswith(("mlx_engine/", "kernels/")) for file in files)
    assert len(files) <= MOST_FILES
    assert len(found) <= MOST_FUNCTIONS
