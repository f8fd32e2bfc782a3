"""Build a wheel with the kernels' machine code (`make wheel`). Users of this wheel need neither Numba nor a compiler.

    python -m tools.wheel                       for this machine's processors
    python -m tools.wheel --machine aarch64     Linux on arm64, compiled here
    python -m tools.wheel --only q8_0 --target x86-64-v3     one part and target; models with other parts run in NumPy

A target is a kind of processor (`kernels/cpu/build/prebuilt.py`). For each target, all parts of the kernels are
compiled, which takes minutes, and linked to a shared library. Object files are kept in build/prebuilt, so that an
interrupted build can be continued. On Linux the linker is LLVM's, from the package `ziglang`; on macOS it is the
system's linker.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kernels.cpu.build import library, machine_code
from kernels.cpu.build.prebuilt import MANIFEST, TARGETS, Target
from tools.hatch_hooks import FOLDER, PLATFORM

ROOT = Path(__file__).parents[1]
# Platform tags of the wheel. The only function that the libraries need from the system is memset. macOS 11 is the first
# version on arm64.
PLATFORMS = {"linux": "manylinux_2_17_{machine}.manylinux2014_{machine}", "darwin": "macosx_11_0_arm64"}
BITS, GROUPS, SCALES = "234568", (32, 64, 128), ("f16", "bf16", "f32")


def all_parts() -> list[str]:
    """Return the names of all parts of the kernels; `library.MODULES` and `library.FORMATS` list them."""
    affine = [f"affine{bits}_g{group}_{scales}" for bits in BITS for group in GROUPS for scales in SCALES]
    formats = [*library.FORMATS, *affine]
    return [*library.MODULES, *formats, *(name + library.FIXED_END for name in formats if name != "float32")]


def objects(name: str, parts: Sequence[str], kept: Path) -> list[Path]:
    """Return the object files of these parts for the target `name`; compile the files that are missing in `kept`."""
    folder = kept / library.folder().name / name
    folder.mkdir(parents=True, exist_ok=True)
    files = {part: folder / f"{part}.o" for part in parts}
    missing, start = [part for part in parts if not files[part].exists()], time.monotonic()
    n = len(missing)

    def keep(part: str, code: bytes) -> None:
        draft = files[part].with_suffix(".part")
        draft.write_bytes(code)
        draft.replace(files[part])
        missing.remove(part)
        print(f"{name}: {n - len(missing)} of {n} parts in {time.monotonic() - start:.0f} s: {part}", flush=True)

    if missing:
        machine_code.build(tuple(missing), keep, TARGETS[name])
    return list(files.values())


def link(target: Target, files: Sequence[Path], out: Path) -> None:
    """Link object files to a shared library. Its only undefined symbols are in the system's C library."""
    if sys.platform == "darwin":
        command = ["cc", "-dynamiclib", "-arch", "arm64", "-Wl,-undefined,dynamic_lookup", "-Wl,-x"]
    else:
        command = [sys.executable, "-m", "ziglang", "ld.lld", "-shared", "-s", "--hash-style=gnu", "-z", "now"]
    subprocess.run([*command, "-o", out, *files], check=True)


def prebuilt(names: Sequence[str], parts: Sequence[str], folder: Path, kept: Path) -> None:
    """Write the libraries of these targets and their manifest into `folder`; keep object files in `kept`."""
    shutil.rmtree(folder, ignore_errors=True)  # the wheel takes all files of the folder
    folder.mkdir(parents=True)
    targets = {}
    for name in names:
        file = folder / f"{name}{'.dylib' if sys.platform == 'darwin' else '.so'}"
        link(TARGETS[name], objects(name, parts, kept), file)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        targets[name] = {"file": file.name, "sha256": digest, "parts": sorted(parts)}
        print(f"{name}: {file.stat().st_size:,} bytes", flush=True)
    source = library.folder().name
    (folder / MANIFEST).write_text(json.dumps({"source": source, "targets": targets}, indent=1) + "\n")


def main() -> None:
    """Compile, link, and build the wheel."""
    parser = argparse.ArgumentParser(prog="python -m tools.wheel", description=(__doc__ or "").split("\n")[0])
    own = {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())
    parser.add_argument("--machine", default=own, choices=sorted({target.machine for target in TARGETS.values()}))
    parser.add_argument("--target", action="append", help="a target of --machine; may be repeated; default: all")
    about_only = "a part to compile besides the parts that every model needs; may be repeated; default: all"
    parser.add_argument("--only", action="append", help=about_only)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the wheel is written")
    given = parser.parse_args()
    if sys.platform == "darwin" and given.machine != "aarch64":
        parser.error("--machine: on macOS a wheel is for aarch64")
    names = [name for name, target in TARGETS.items() if target.machine == given.machine]
    names = [name for name in names if given.target is None or name in given.target]
    if not names:
        parser.error(f"--target: {given.machine} has no such target")
    unknown = ", ".join(part for part in given.only or () if part not in all_parts())
    if unknown:
        parser.error(f"--only: the kernels have no part {unknown}; the formats are {', '.join(library.FORMATS)}")
    parts = all_parts() if given.only is None else [*library.BASE, *given.only]
    folder = ROOT / "build" / "prebuilt" / given.machine
    prebuilt(names, parts, folder, folder.parent)
    tag = PLATFORMS[sys.platform].format(machine=given.machine)
    environment = {**os.environ, FOLDER: str(folder), PLATFORM: tag}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", given.out]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


if __name__ == "__main__":
    main()
