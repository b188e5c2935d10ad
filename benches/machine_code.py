#!/usr/bin/env python3
"""What NVIDIA's compilers make of the kernels, without a GPU.

    cargo run --release --example cuda_source -- --out sources
    python3 benches/machine_code.py sources/cuda

or, of the PTX that CubeCL's LLVM makes, with `--features cuda`, sources/ptx-sm_90a.

CUDA C++ is compiled by NVRTC and ptxas for each architecture, PTX by ptxas for its own, and the machine code is read:
registers, spills, the widths of loads and stores, and how many loads go out before the first one is waited for. From
registers and cube size follow the warps that a multiprocessor holds, and from both the bytes that it has in flight. What
spills is compiled once more for one cube a multiprocessor: ptxas spills a few registers where one more cube then fits,
which CubeCL cannot forbid, and what it spills with all registers (`forced`) is what a kernel needs too many of. Prints a
row a kernel, with the range of its variants; `--csv FILE` has a row a variant. Exits with 1 if a source does not compile,
and with `--check` also if one spills or uses local memory.

The compilers are NVIDIA's, from wheels, and stay in a cache folder.
"""

import argparse
import collections
import concurrent.futures
import csv
import ctypes
import os
import pathlib
import re
import subprocess
import sys
import tempfile

VERSION = "13.5.37"
WHEELS = [f"nvidia-cuda-{part}=={VERSION}" for part in ("nvrtc", "nvcc", "runtime", "crt", "nvdisasm")]
WHEELS.append("nvidia-cuda-cccl==13.3.5.0.6")
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / f"dar-cuda-{VERSION}"
ARCHITECTURES = ["sm_80", "sm_90a", "sm_100a"]
FIELDS = "file architecture registers warps stack spilled forced local load store in_flight kib_in_flight instructions"
SPILLED = r"(\d+) bytes spill stores"
# Of a multiprocessor, on each of them.
REGISTERS, WARPS, CUBES = 65536, 64, 32


def root():
    """The folder of the compilers; fetches them once."""
    if not CACHE.is_dir():
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE.parent) as folder:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
            subprocess.run([*pip, f"{folder}/cuda", *WHEELS], check=True)
            os.rename(f"{folder}/cuda", CACHE)
    [found] = CACHE.glob("nvidia/cu*")
    for tool in found.glob("bin/*"):
        tool.chmod(0o755)
    return found


class Nvrtc:
    """CUDA C++ to PTX, with the options of CubeCL's CUDA runtime."""

    def __init__(self, folder):
        library = next((folder / "lib").glob("libnvrtc.so.*"))
        ctypes.CDLL(str(next((folder / "lib").glob("libnvrtc-builtins.so*"))), ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(library))
        self.includes = [f"--include-path={folder / 'include'}", f"--include-path={folder / 'include/cccl'}"]

    def text(self, program, what):
        size = ctypes.c_size_t()
        getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        getattr(self.library, f"nvrtcGet{what}")(program, text)
        return text.value.decode()

    def ptx(self, source, architecture):
        program = ctypes.c_void_p()
        self.library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), None, 0, None, None)
        options = [f"--gpu-architecture={architecture}", "-lineinfo", *self.includes]
        options = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        refused = self.library.nvrtcCompileProgram(program, len(options), options)
        try:
            if refused:
                raise RuntimeError(self.text(program, "ProgramLog"))
            return self.text(program, "PTX")
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))


def width(operation):
    """Bits of a load or a store."""
    bits = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "ENL2": 256}
    return max([bits[part] for part in operation.split(".") if part in bits], default=32)


def parse(listing):
    """Operation and operands of every instruction; None at a place that is jumped to."""
    for line in listing.splitlines():
        if re.match(r"\s*\.L_x_\d+:", line):
            yield None
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*(\S+)\s*(.*?);", line):
            yield instruction.groups()


def in_flight(instructions):
    """The most loads that go out in a row before a register of one of them is used; one of 256 bits counts as two."""
    most, waiting, count = 0, set(), 0
    for instruction in instructions:
        if instruction is None:
            waiting, count = set(), 0
            continue
        operation, operands = instruction
        used = {int(register) for register in re.findall(r"\bR(\d+)", operands)}
        if operation.startswith("LDG"):
            target = re.match(r"\D*R(\d+)", operands)
            address = {int(register) for register in re.findall(r"\bR(\d+)", operands.split(",", 1)[1])}
            if address & waiting:
                waiting, count = set(), 0
            first = int(target[1])
            waiting |= set(range(first, first + max(1, width(operation) // 32)))
            count += max(1, width(operation) // 128)
            most = max(most, count)
        elif used & waiting:
            waiting, count = set(), 0
    return most


def resident(registers, units):
    """Warps on a multiprocessor that holds as many cubes as registers, warps and slots allow."""
    warps = -(-units // 32)
    by_registers = REGISTERS // (-(-registers * 32 // 256) * 256 * warps)  # 256 registers at a time
    return warps * min(by_registers, WARPS // warps, CUBES)


def takes(path, architecture):
    """Whether a source is for an architecture: PTX names its own."""
    return path.suffix != ".ptx" or f".target {architecture}\n" in path.read_text()


def assemble(ptx, architecture, folder):
    """What ptxas says of PTX, and the machine code."""
    with tempfile.TemporaryDirectory() as work:
        (source, binary) = (f"{work}/kernel.ptx", f"{work}/kernel.cubin")
        pathlib.Path(source).write_text(ptx)
        command = [folder / "bin/ptxas", f"-arch={architecture}", "-v", source, "-o", binary]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        command = [folder / "bin/nvdisasm", "-c", binary]
        return said, subprocess.run(command, capture_output=True, text=True, check=True).stdout


def total(pattern, said):
    return sum(map(int, re.findall(pattern, said)))


def report(path, architecture, folder):
    """The row of one source on one architecture, or what a compiler says."""
    row = {"file": path.name, "architecture": architecture}
    try:
        text = path.read_text()
        ptx = text if path.suffix == ".ptx" else Nvrtc(folder).ptx(text, architecture)
        said, listing = assemble(ptx, architecture, folder)
        forced = spilled = total(SPILLED, said)
        if spilled:
            alone = re.sub(r"(\.(?:max|req)ntid[^\n]*\n)", r"\1.minnctapersm 1\n", ptx, count=1)
            forced = total(SPILLED, assemble(alone, architecture, folder)[0])
    except (RuntimeError, subprocess.CalledProcessError) as error:
        return row | {"error": getattr(error, "stderr", None) or str(error)}
    registers = max(map(int, re.findall(r"Used (\d+) registers", said)))
    warps = resident(registers, int(re.search(r"\.(?:max|req)ntid\s+(\d+)", ptx)[1]))
    instructions = list(parse(listing))
    loads = in_flight(instructions)
    count = collections.Counter(instruction[0] for instruction in instructions if instruction)
    of = lambda *kinds: [operation for operation in count if operation.startswith(kinds)]
    return row | {
        "registers": registers,
        "warps": warps,
        "stack": total(r"(\d+) bytes stack frame", said),
        "spilled": spilled,
        "forced": forced,
        "local": sum(count[operation] for operation in of("LDL", "STL")),
        "load": (load := max(map(width, of("LDG")), default=0)),
        "store": max(map(width, of("STG")), default=0),
        "in_flight": loads,
        "kib_in_flight": warps * loads * 32 * min(load, 128) // 8 // 1024,
        "instructions": sum(number for operation, number in count.items() if operation != "NOP"),
    }


def table(rows):
    """Markdown: a row a kernel, over its variants and architectures."""
    kernels = collections.defaultdict(list)
    for row in rows:
        kernels[row["file"].split("-")[0]].append(row)
    span = lambda values: f"{min(values)}" if min(values) == max(values) else f"{min(values)}–{max(values)}"
    head = "kernel|variants|registers|warps|spilled bytes|load bits|store bits|loads in flight|KiB in flight".split("|")
    lines = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
    for kernel, rows in sorted(kernels.items()):
        column = lambda name: [row[name] for row in rows]
        shown = "registers warps spilled load store in_flight kib_in_flight".split()
        cells = [len(set(column("file"))), *map(span, map(column, shown))]
        lines.append(f"| `{kernel}` | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=pathlib.Path, help="CUDA C++ and PTX, or folders of them")
    parser.add_argument("--architecture", action="append", help=f"of {', '.join(ARCHITECTURES)} (all)")
    parser.add_argument("--csv", type=pathlib.Path, help="writes a row a variant and architecture")
    parser.add_argument("--check", action="store_true", help="fails where a kernel spills or uses local memory")
    arguments = parser.parse_args()

    inside = lambda path: sorted(file for file in path.iterdir() if file.suffix in (".cu", ".ptx"))
    files = [file for path in arguments.sources for file in (inside(path) if path.is_dir() else [path])]
    folder = root()
    wanted = arguments.architecture or ARCHITECTURES
    jobs = [(file, architecture, folder) for architecture in wanted for file in files if takes(file, architecture)]
    if not jobs:
        parser.error(f"nothing to compile for {', '.join(wanted)} in {', '.join(map(str, arguments.sources))}")
    rows = []
    with concurrent.futures.ProcessPoolExecutor() as pool:
        for done in concurrent.futures.as_completed([pool.submit(report, *job) for job in jobs]):
            rows.append(done.result())
            print(f"\r{len(rows)} of {len(jobs)}", end="\n" * (len(rows) == len(jobs)), file=sys.stderr, flush=True)
    rows.sort(key=lambda row: (row["file"], row["architecture"]))

    for row in rows:
        if "error" in row:
            print(f"{row['file']} {row['architecture']}: {row['error'][:2000]}", file=sys.stderr)
    compiled = [row for row in rows if "error" not in row]
    if arguments.csv:
        with open(arguments.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS.split())
            writer.writeheader()
            writer.writerows(compiled)
    print(table(compiled))
    spilling = [row for row in compiled if row["spilled"]]
    forced = sum(row["forced"] > 0 for row in spilling)
    print(f"\n{len(spilling)} of {len(compiled)} spill, {forced} of them with all registers.")
    bad = [row for row in compiled if row["stack"] or row["spilled"] or row["local"]] if arguments.check else []
    for row in bad:
        print(f"{row['file']} {row['architecture']}: local memory", file=sys.stderr)
    return int(len(compiled) < len(rows) or bool(bad))


if __name__ == "__main__":
    sys.exit(main())
