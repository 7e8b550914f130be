"""Checks what a wheel holds and what its native modules ask of the machine that it lands on.

Several wheels, one built from the tree and one from the source distribution, must hold the same files.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LIBRARIES = {"libtorch.so", "libtorch_cpu.so", "libc10.so"} | {
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "libm.so.6",
    "libc.so.6",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
}


def wheel_problems(path: Path) -> list[str]:
    problems = []
    name, version, *tag = path.stem.split("-")
    if tag[:2] != ["cp310", "abi3"]:
        problems.append(f"tag is {'-'.join(tag)}, expected cp310-abi3-*")
    if name != "specdec_ops" or version == "0.0.0":
        problems.append(f"name and version are {name} {version}")
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        info = f"{name}-{version}.dist-info"
        for needed in ("specdec_ops/_C.abi3.so", "specdec_ops/py.typed", f"{info}/licenses/LICENSE"):
            if needed not in names:
                problems.append(f"{needed} is missing")
        known = re.compile(
            rf"specdec_ops/([a-z]\w*/)*(\w+\.pyi?|py\.typed)|specdec_ops/_C(_cuda)?\.abi3\.so|{info}/.+"
        )
        problems += [f"{entry} does not belong here" for entry in sorted(names) if not known.fullmatch(entry)]
        metadata = wheel.read(f"{info}/METADATA").decode()
        for requirement in ("torch>=2.10", "numpy"):
            if f"Requires-Dist: {requirement}\n" not in metadata:
                problems.append(f"the metadata does not require {requirement}")
        with tempfile.TemporaryDirectory() as folder:
            for entry in sorted(names):
                if entry.endswith(".so"):
                    library = Path(wheel.extract(entry, folder))
                    problems += [f"{entry}: {problem}" for problem in library_problems(library)]
    return problems


def differences(wheels: list[Path]) -> list[str]:
    """What some of the wheels lack."""
    held = {wheel: set(zipfile.ZipFile(wheel).namelist()) for wheel in wheels}
    return [
        f"{wheel}: {name} is missing, which {other} holds"
        for wheel in wheels
        for other in wheels
        for name in sorted(held[other] - held[wheel])
    ]


def library_problems(library: Path) -> list[str]:
    problems = []
    dynamic = run("objdump", "--private-headers", str(library))
    needed = set(re.findall(r"NEEDED\s+(\S+)", dynamic))
    problems += [f"needs {extra}" for extra in sorted(needed - LIBRARIES)]
    problems += [f"has a search path: {path}" for path in re.findall(r"R(?:UN)?PATH\s+(\S+)", dynamic)]
    symbols = run("nm", "--dynamic", "--defined-only", str(library)).split("\n")
    exported = {line.split()[-1] for line in symbols if line}
    init = f"PyInit_{library.name.partition('.')[0]}"
    problems += [f"exports {symbol}" for symbol in sorted(exported - {init})]
    problems += [f"does not export {symbol}" for symbol in {init} - exported]
    content = library.read_bytes()
    folders = {str(Path.cwd()), str(Path.home()), "site-packages", "/tmp/"}
    problems += [
        f"holds a path of the build machine: {folder}" for folder in folders if folder.encode() in content
    ]
    glibc = max(re.findall(r"GLIBC_(\d+)\.(\d+)", dynamic), key=lambda v: tuple(map(int, v)), default=None)
    if glibc:
        print(f"{library.name}: needs glibc {'.'.join(glibc)}, {len(content) / 1024:.0f} KB")
    return problems


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    wheels = [Path(argument) for argument in sys.argv[1:]]
    if not wheels:
        sys.exit("usage: check_wheel.py WHEEL...")
    problems = [f"{wheel.name}: {problem}" for wheel in wheels for problem in wheel_problems(wheel)]
    problems += differences(wheels)
    print("\n".join(problems) or f"{', '.join(wheel.name for wheel in wheels)}: ok")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
