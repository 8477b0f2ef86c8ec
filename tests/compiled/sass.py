"""What ptxas made of a kernel, read back from its machine code.

A product on Hopper reads its tiles where descriptors in uniform registers say. ptxas 12.8, which triton 3.6.0
and 3.7.1 run for Hopper, has lost the instruction that began such a descriptor, where two tiles of different
layouts lay at one address: the kernel compiled, and read from wherever the register pointed. ptxas 13.1 did
not. From 3.9 on Triton runs ptxas 13.4 for Hopper too.
"""

import re
import subprocess
from tempfile import NamedTemporaryFile
from types import MappingProxyType

INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);", re.MULTILINE)
UNIFORM = re.compile(r"-?UR(\d+)$")
# Beside the opcodes of the uniform datapath, which begin with U, those that write one of its registers; and
# of the former those whose uniform operands are all read.
WRITE = ("ELECT", "R2UR", "S2UR", "CS2UR", "LDCU", "VOTEU", "REDUX", "CREDUX")
READ = ("UISETP", "UFSETP", "UR2UP")
# What leaves the bits of an address that a descriptor has room for: 14 of them, and 15 from Triton 3.8 on.
CUT = MappingProxyType({"ULOP3": {"0x3fff", "0x7fff"}, "USGXT": {"0xe", "0xf"}})
# Bytes that plain loads and stores of shared memory move, by what follows their name.
MOVED = MappingProxyType({"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16})
DIRECT = re.compile(r"\[UR\d+(?:\+0x([0-9a-f]+))?\]")  # an address that all threads share
CALLED = re.compile(
    r"^(\$[\w$]+):$", re.MULTILINE
)  # functions that ptxas brings along, behind the kernel: divisions
CARRY = ("UMOV", "UIADD3", "ULOP3", "USEL")  # what a descriptor's lower half goes through


def disassembled(cubin: bytes) -> str:
    """The machine code of a binary as text."""
    from triton import knobs

    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def lost(text: str) -> list[str]:
    """Instructions that read a uniform register which none before them writes, or a descriptor made of no
    address.

    The second finds registers that still hold something else; before them is where the text has them, loops
    or not. ptxas 13.4 copies and saves pairs of registers of which one is not written yet. A copy of nothing
    is nothing, and what reads it is found.
    """
    written, addresses, empty, found, by_called = set(), set(), set(), [], _written_by_called(text)
    for instruction in INSTRUCTION.finditer(text):
        opcode, operands = instruction[1], [x.strip() for x in instruction[2].split(",")]
        into = _destination(opcode, operands)
        written |= by_called.get(operands[-1].strip("`()"), set())
        sources = operands[into + 1 :]
        reads = {n for x in sources for n in _read(opcode, operands, x)}
        if opcode == "UPRMT":  # which may keep half of a register that nothing has written yet
            reads -= {*_written(opcode, operands[into])}
        if opcode == "MOV.SPILL":
            empty = empty - {operands[0]} | ({operands[0]} if reads - written else set())
            continue
        if (opcode == "UMOV" and reads - written) or (opcode == "R2UR.FILL" and sources[0] in empty):
            addresses -= {*_written(opcode, operands[into])}
            continue
        if reads - written or _lower_halves(opcode, operands) - addresses:
            found.append(" ".join(instruction[0].split("*/", 1)[1].split()))
        written |= reads  # each register once
        if into >= 0:
            first, *others = _written(opcode, operands[into])
            kept = {first} if _is_address(opcode, sources, addresses) else set()
            addresses = addresses - {first, *others} | kept
            written |= {first, *others}
    return found


def _written_by_called(text: str) -> dict[str, set[int]]:
    """The uniform registers that each function behind the kernel writes, by its name."""
    _, *parts = CALLED.split(text)
    found = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        split = [(x[1], [operand.strip() for operand in x[2].split(",")]) for x in INSTRUCTION.finditer(body)]
        places = [(opcode, operands, _destination(opcode, operands)) for opcode, operands in split]
        found[name] = {
            n for opcode, operands, into in places if into >= 0 for n in _written(opcode, operands[into])
        }
    return found


def reused(text: str) -> list[str]:
    """Plain reads and writes of shared memory where a barrier is made.

    Triton gives the room of a barrier that nobody waits for to others. What is written there then comes out
    wrong, once the chip stops a program midway to let another process compute: the barrier is written after
    it.
    """
    made, plain = set(), []
    for instruction in INSTRUCTION.finditer(text):
        name, *parts = instruction[1].split(".")
        if (found := DIRECT.search(instruction[2])) is None:
            continue
        first = int(found[1] or "0", 16)
        if name == "SYNCS" and parts[0] == "EXCH":
            made |= set(range(first, first + 8))
        elif name in ("LDS", "STS"):
            size = next((MOVED[part] for part in parts if part in MOVED), 4)
            plain.append((set(range(first, first + size)), f"{instruction[1]} {instruction[2]}"))
    return [words for places, words in plain if places & made]


def _destination(opcode: str, operands: list[str]) -> int:
    """Which operand is the uniform register that is written; -1 for none."""
    name = opcode.split(".")[0]
    if name in READ or not (name.startswith("U") or name in WRITE):
        return -1
    first = next((n for n, x in enumerate(operands) if not re.match(r"U?P", x)), 0)
    return first if UNIFORM.match(operands[first]) else -1


def _written(opcode: str, x: str) -> range:
    """The registers that an instruction writes from ``x`` on."""
    parts, first = opcode.split("."), int(UNIFORM.match(x)[1])
    return range(first, first + (4 if "128" in parts else 2 if "64" in parts or "WIDE" in parts else 1))


def _read(opcode: str, operands: list[str], x: str) -> range | list[int]:
    """The uniform registers of an operand; a descriptor is a pair, and Hopper's products have two side by
    side.
    """
    described = re.match(r"g?desc\[UR(\d+)\]", x)
    if described is None:
        return [int(n) for n in re.findall(r"\bUR(\d+)\b", x)]
    first = int(described[1])
    if "GMMA" not in opcode:
        return range(first, first + 2)
    from_registers = any(re.match(r"R\d", y) for y in operands[1 : operands.index(x)])  # the first factor
    return range(first + 2 * from_registers, first + 4)


def _lower_halves(opcode: str, operands: list[str]) -> set[int]:
    """The registers with the address of each descriptor of a product on Hopper."""
    described = (x for x in operands if "GMMA" in opcode and x.startswith("gdesc"))
    return {n for x in described for n in _read(opcode, operands, x)[::2]}


def _is_address(opcode: str, sources: list[str], addresses: set[int]) -> bool:
    """Whether what is written can be the address of a descriptor; what comes from other registers can."""
    name = opcode.split(".")[0]
    if name == "R2UR" or not CUT.get(name, set()).isdisjoint(sources):
        return True
    uniform = {int(match[1]) for x in sources if (match := UNIFORM.match(x))}
    return name in CARRY and opcode != "UIADD3.X" and not uniform.isdisjoint(addresses)
