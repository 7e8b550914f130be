"""Checks that instructions above the x86-64 baseline stay in the functions of their tier.

A function may use EVEX encodings and mask registers only if its demangled name has a namespace or
word with ``avx512`` in it, and VEX encodings only with ``avx2`` or ``avx512``. Everything else must
run on any x86-64 processor: one such instruction outside is a SIGILL on somebody's machine.
"""

from __future__ import annotations

import argparse
import collections
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

LEGACY_PREFIXES = {"66", "f2", "f3", "2e", "36", "3e", "26", "64", "65", "67", "f0"}
#: Encoded without VEX, but younger than x86-64 (SSE3 to SSE4.2, POPCNT, AES, SHA, ...). Not here:
#: tzcnt, which GCC emits as `rep bsf` because old processors run it as bsf.
ABOVE_BASELINE = re.compile(
    r"addsub|hadd|hsub|lddqu|movddup|movs[hl]dup|fisttp"
    r"|pabs|palignr|phadd|phsub|pmaddubsw|pmulhrsw|pshufb|psign"
    r"|p?blend|dpp[sd]|extractps|insertps|movntdqa|mpsadbw|packusdw|pcmpeqq|pextr[bdq]|phminpos|pinsr[bdq]"
    r"|pm(ax|in)(sb|sd|ud|uw)|pmov[sz]x|pmuldq|pmulld|ptest|round[ps][sd]"
    r"|crc32|pcmp[ei]str|pcmpgtq|popcnt|lzcnt|movbe|ad[co]x|aes|sha(1|256)|pclmul|rdrand|rdseed|gf2p8"
)
FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
INSTRUCTION = re.compile(r"^\s*[0-9a-f]+:\t((?:[0-9a-f]{2} )+)\s*\t(\S.*)$")


class Leak(NamedTuple):
    function: str
    needs: str
    instruction: str


def needed_tier(code: list[str], text: str) -> str | None:
    """The tier that an instruction needs, None for the baseline."""
    opcode = next((byte for byte in code if byte not in LEGACY_PREFIXES), "")
    if opcode == "62" or re.search(r"%(zmm|k[0-7]\b)", text):
        return "avx512"
    if opcode in ("c4", "c5"):
        return "avx2"
    return "newer than x86-64" if ABOVE_BASELINE.match(text) else None


def allowed(function: str, tier: str) -> bool:
    return "avx512" in function or (tier != "avx512" and "avx2" in function)


def disassemble(binary: Path) -> Iterator[tuple[str, list[str], str]]:
    """(function, bytes, instruction) for everything in the binary's code sections."""
    command = ["objdump", "--disassemble", "--demangle", "--wide", str(binary)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        function = "?"
        for line in process.stdout:
            if found := FUNCTION.match(line):
                function = found[1]
            elif found := INSTRUCTION.match(line.rstrip("\n")):
                yield function, found[1].split(), found[2]
    if process.returncode:
        sys.exit(f"check_isa_leak: objdump failed on {binary}")


def check(binary: Path) -> tuple[list[Leak], collections.Counter[str]]:
    """The leaks of a binary, and how many instructions of each tier it has."""
    leaks, counts = [], collections.Counter[str]()
    for function, code, text in disassemble(binary):
        tier = needed_tier(code, text)
        if tier is None:
            continue
        counts[tier] += 1
        if not allowed(function, tier):
            leaks.append(Leak(function, tier, text))
    return leaks, counts


def self_test() -> None:
    """Compiles functions with and without leaks and checks that the right ones are found."""
    source = """
        #include <immintrin.h>
        #define FOR(t) __attribute__((target(t), noinline, used))
        namespace avx512 { FOR("avx512f") __m512i good(__m512i a) { return _mm512_add_epi64(a, a); } }
        namespace avx2 { FOR("avx2") __m256i good(__m256i a) { return _mm256_add_epi64(a, a); } }
        namespace avx2 { FOR("avx512f,avx512vl") __m256i evex(__m256i a) { return _mm256_rol_epi64(a, 3); } }
        namespace scalar { FOR("avx2") __m256i vex(__m256i a) { return _mm256_add_epi64(a, a); } }
        namespace scalar { FOR("avx512f") void mask(__mmask16 a, __mmask16* b) { *b = _mm512_kand(a, *b); } }
        namespace scalar { FOR("popcnt") int count(unsigned a) { return __builtin_popcount(a); } }
        namespace scalar { FOR("bmi2") unsigned long shift(unsigned long a, int n) { return a << n; } }
        namespace scalar { int good(int a) { return __builtin_ctz(a) + a / 3; } }
    """
    expected = {"avx2::evex", "scalar::vex", "scalar::mask", "scalar::count", "scalar::shift"}
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "self_test.o")
        compiler = shutil.which("c++") or sys.exit("check_isa_leak: the self-test needs a C++ compiler")
        subprocess.run(
            [compiler, "-O2", "-Wno-psabi", "-x", "c++", "-c", "-", "-o", str(binary)],
            input=source,
            text=True,
            check=True,
        )
        found = {leak.function.partition("(")[0] for leak in check(binary)[0]}
    if found != expected:
        sys.exit(f"check_isa_leak: self-test found {sorted(found)}, expected {sorted(expected)}")
    print("check_isa_leak: self-test ok")


def unpacked(paths: Iterable[Path], folder: Path) -> Iterator[Path]:
    """The paths, with the shared libraries of a wheel in place of the wheel."""
    for path in paths:
        if path.suffix != ".whl":
            yield path
            continue
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                if name.endswith(".so"):
                    yield Path(wheel.extract(name, folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "binaries", nargs="*", type=Path, help="wheels, shared libraries or objects, unstripped"
    )
    parser.add_argument("--self-test", action="store_true", help="check first that leaks are found")
    args = parser.parse_args()
    if platform.machine() not in ("x86_64", "AMD64"):
        print("check_isa_leak: nothing to check: the tiers are for x86-64")
        return
    if shutil.which("objdump") is None:
        sys.exit("check_isa_leak: objdump was not found; install binutils")
    if args.self_test:
        self_test()

    failed, found = False, collections.Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for binary in unpacked(args.binaries, Path(folder)):
            leaks, counts = check(binary)
            found += counts
            for leak in leaks[:50]:
                print(f"{binary.name}: {leak.function}: {leak.instruction!r} needs {leak.needs}")
            failed = failed or bool(leaks)
            vex, evex = counts["avx2"], counts["avx512"]
            print(f"{binary.name}: {vex} VEX and {evex} EVEX instructions, {len(leaks)} leaked")
    if not found["avx2"] or not found["avx512"]:
        print("no AVX2 or no AVX-512 code found: is the library with the kernels among these?")
        failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
