"""The loops of Hopper's own kernels, in which warpgroups multiply: what ptxas made of them, and what it must.

A product runs on while its warps go on; ``WARPGROUP.DEPBAR.LE gsb0, n`` waits until at most n groups of
products run. Softmax is under a product where its exponentials come before that wait. ptxas has moved waits
above exponentials, and where an accumulator in flight is read it waits for each product on its own (its
warnings C7510 and C7514).
"""

import re
from collections import Counter
from itertools import permutations
from types import MappingProxyType
from typing import NamedTuple

from attnlib.backends._triton.dense.hopper import triton_version
from attnlib.backends._triton.dense.hopper_tables import for_version
from attnlib.backends._triton.launching.launch import Launch

LINE = re.compile(
    r"^(?:(?P<label>\.L_\w+):|\s*/\*[0-9a-f]{4,}\*/\s+(?P<guard>@!?U?P\w+\s+)?(?P<code>[A-Z][^;]*?)\s*;)",
    re.MULTILINE,
)
JUMP = re.compile(r"BRA\b.*`\((\.L_\w+)\)")
LEAVES = re.compile(r"(?:BRA|BRX|EXIT|RET)\b")  # without a guard, what comes next is not run next
PRODUCT = re.compile(r"(?:HG?|QG)MMA\b")  # of a warpgroup, of 16 or of 8 bits, or of a warp
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\w+)")


class Trip(NamedTuple):
    """What the quickest trip through a loop runs, in which no block is masked and nobody waits for a tile.

    ``waits`` are how many groups of products each wait leaves running; ``late`` are the exponentials behind
    the last wait that leaves none; ``spills`` read or write the stack.
    """

    products: int
    waits: tuple[int, ...]
    exponentials: int
    late: int
    spills: int


class Loop(NamedTuple):
    """What a trip through a loop with products should run; all of its exponentials, if any, before the last
    wait.

    Products of single warps have no waits: a warp waits for what it reads.
    """

    products: int
    waits: tuple[int, ...]
    softmax: bool = True  # it has exponentials
    under_product: bool = True  # and they come before the last wait


def _forward(constants: dict) -> tuple[Loop, ...]:
    """A loop for each consumer: scores, the product before them, and softmax between the waits for these
    two. The partner of a wide head has no scores.
    """
    channels, keys = constants["D_MAIN"] + constants["D_TAIL"], constants["BLOCK_N"]
    partner = (Loop(keys // DEPTH, waits=(0,), softmax=False),) * bool(constants["E_TAIL"])
    return (Loop((channels + keys) // DEPTH, waits=(1, 0)),) * constants["CONSUMERS"] + partner


def _forward_fp8(constants: dict) -> tuple[Loop, ...]:
    """A loop for each consumer. Wide values are multiplied piece by piece, before scores: softmax is under
    nothing. The scores of narrow heads come in two parts, each of which is waited for.
    """
    channels, values = constants["D_MAIN"] + constants["D_TAIL"], constants["E_MAIN"]
    pieces, parts = values // 64 if values > 128 else 1, 2 if max(channels, values) <= 64 else 1
    products = (parts * channels + pieces * constants["BLOCK_N"]) // (2 * DEPTH)
    waits = (1,) * parts + (0,) if pieces == 1 else (1,) * (pieces - 1) + (0, 0)
    return (Loop(products, waits, under_product=pieces == 1),) * constants["CONSUMERS"]


def _backward(constants: dict) -> tuple[Loop, ...]:
    """A loop for each consumer; of the widest heads, one without softmax makes dv; one may be for dq
    alone.
    """
    rows, channels = constants["BLOCK_M"], constants["D_MAIN"] + constants["E_MAIN"]
    if constants["DQ_REGISTERS"]:
        consumer = Loop((channels + 2 * rows) // DEPTH, waits=(0, 1, 0))
        return consumer, Loop(2 * KEYS // DEPTH, (0,), softmax=False), consumer
    if constants["TILES"] == 2:
        return (Loop(48, waits=(0, 1, 0, 1, 1, 0)),) * 2
    return Loop(24, (0, 1, 0), softmax=False), Loop(24, (0, 1, 0))


def _backward_upto_512(constants: dict) -> tuple[Loop, ...]:
    """The leader's loop, of one or two products for the weights and one for its sums, and the partner's."""
    rows, made = constants["BLOCK_M"], 1 if constants["OF"] == "dv" else 2
    leader = Loop((made * 512 + rows) // DEPTH, waits=(0, 0), under_product=False)
    return leader, Loop(rows // DEPTH, waits=(0,), softmax=False)


def _decode_mla(constants: dict) -> tuple[Loop, ...]:
    """A loop for each consumer. Of 64 rows, the consumers of even and of odd tiles wait in another order; of
    16 rows in int8 or fp8, each tile comes in two chunks.
    """
    if constants["BLOCK_M"] == 64:
        return Loop(44, (1, 0, 0)), Loop(44, (0, 0, 0))
    return (Loop(68, (0,) * (5 if "scale_desc" in constants else 2)),) * 2


def _selected_latents(constants: dict) -> tuple[Loop, ...]:
    """The loops of decoding with 64 rows."""
    return _decode_mla({"BLOCK_M": 64})


def _decode_gqa(constants: dict) -> tuple[Loop, ...]:
    """A loop for every 16 rows."""
    if "k_scale_desc" in constants:
        return (Loop(64, ()),)
    return (Loop(32, ()),) * (constants["BLOCK_M"] // 16)


DEPTH, KEYS = 16, 64  # channels, or keys, of a matrix instruction; keys of a tile of the backward
# By kernel, from the constants that it is compiled for, and the descriptors that are there: its loops, in any
# order.
EXPECTED = MappingProxyType(
    {
        "forward": _forward,
        "forward_fp8": _forward_fp8,
        "backward": _backward,
        "backward_upto_512": _backward_upto_512,
        "finish_queries": lambda constants: (),
        "decode_mla": _decode_mla,
        "selected_latents": _selected_latents,
        "decode_gqa": _decode_gqa,
    }
)
# By the first version of Triton that they are for, as launch tables are: a version has those of the newest
# one that is not above it. Words that a trip of any build reads and writes on the stack: of ptxas 13.4, fp8
# at d128 30 to 42 unless all is seen, and at d256 up to 178. Blocks of 64 keys leave none at d128; under 3.6
# they did 857 TFLOP/s at d256, and those of 128 keys 1,036. Which is faster under 3.9 has not been timed.
MOST = MappingProxyType(
    {
        (3, 6): {"backward": 30, "forward_fp8": 2},
        (3, 9): {"backward": 30, "forward_fp8": 200, "selected_latents": 1},
    }
)
# And of single builds: no more than these. What those of 3.6 and 3.8 cost has not been measured.
# All but the three of decoding, which do not spill under 3.6, have an option that takes registers.
_SINCE_3_6 = {
    "forward d64 bf16 left Hopper": 4,
    "forward d64 bf16 sliding Hopper": 12,
    "forward d64 bf16 prefix Hopper": 6,
    "forward d64 bf16 causal starts Hopper": 4,
    "forward d64 bf16 causal ends Hopper": 2,
    "forward d64 bf16 causal starts and ends Hopper": 6,
    "forward d64 bf16 causal packed Hopper": 2,
    "forward d128 bf16 causal Hopper, slopes": 18,
    "forward d192/128 bf16 causal Hopper, slopes": 16,
    "forward d256 fp8 causal Hopper, slopes": 28,
    "forward d64 bf16 causal Hopper relative": 9,
    "forward d128 bf16 causal Hopper relative": 9,
    "forward d192/128 bf16 causal Hopper relative": 9,
    "decode 16 x d512+64 bf16 causal 2 tokens": 1,
    "selected_decode 128 x d512+64 bf16 in int8 causal blocks of 1": 1,
    "selected_decode 128 x d512+64 bf16 in fp8 causal blocks of 1": 1,
    "backward_keys d64 bf16 causal Hopper capped": 42,
}
SPILLING = MappingProxyType(
    {
        (3, 6): _SINCE_3_6,
        # A prefix at d64, and options in 8 bits, leave ptxas 12.9 fewer registers than 12.8.
        (3, 8): {
            **_SINCE_3_6,
            "forward d64 bf16 prefix Hopper": 10,
            "forward d128 fp8 causal Hopper, softcap": 4,
            "forward d192/128 fp8 causal Hopper, softcap": 4,
            "forward d128 fp8 causal Hopper, slopes": 27,
            "forward d192/128 fp8 causal Hopper, slopes": 27,
            "forward d256 fp8 causal Hopper, softcap": 4,
            "forward d256 fp8 causal Hopper, slopes": 39,
            "backward_keys d128 bf16 causal Hopper capped": 32,
            "decode 16 x d512+64 bf16 causal documents 64 tokens": 6,
            "decode 128 x d512+64 bf16 causal documents": 5,
        },
        # Relative scores at d256 take 7.6 % longer than under 3.6, and with 32 keys, which leave nothing on
        # the stack, 25 %. Decoding keeps a word of an address in a trip of 44 products, of bytes four in one
        # of 68: of bytes it takes as long as under 3.6, of one token 2.3 % longer, of four 7.7 % (see
        # hopper_tables.py).
        (3, 9): {
            "forward d64 bf16 causal Hopper relative": 8,
            "forward d128 bf16 causal Hopper, slopes": 4,
            "forward d128 bf16 causal Hopper relative": 21,
            "forward d192/128 bf16 causal Hopper, slopes": 6,
            "forward d192/128 bf16 causal Hopper, softcap": 1,
            "forward d192/128 bf16 causal Hopper relative": 18,
            "forward d256 bf16 causal Hopper relative": 13,
            "forward d512 bf16 causal Hopper": 1,
            "forward d512 bf16 left Hopper": 1,
            "forward d512 bf16 sliding Hopper": 1,
            "forward d512 bf16 prefix Hopper": 1,
            "forward d512 bf16 causal Hopper, softcap": 1,
            "forward d512 bf16 causal Hopper, sinks": 1,
            "forward d512 bf16 causal Hopper, slopes": 1,
            "forward d512 bf16 causal starts Hopper": 5,
            "forward d512 bf16 causal ends Hopper": 5,
            "forward d512 bf16 causal starts and ends Hopper": 5,
            "forward d512 bf16 causal packed Hopper": 3,
            "decode 128 x d512+64 bf16 causal": 1,
            "decode 128 x d512+64 bf16 causal 4 tokens": 1,
            "decode 16 x d512+64 bf16 causal 2 tokens": 1,
            "decode 16 x d512+64 bf16 causal documents 64 tokens": 1,
            "decode 16 x d512+64 bf16 causal relative 64 tokens": 1,
            "decode 128 x d512+64 bf16 causal documents": 1,
            "decode 128 x d512+64 bf16 causal relative": 3,
            "decode 128 x d512+64 bf16 in int8 causal": 4,
            "decode 128 x d512+64 bf16 in fp8 causal": 4,
            "backward_keys d64 bf16 causal Hopper capped": 134,
            "backward_keys d128 bf16 causal Hopper capped": 79,
        },
    }
)


def disorder(name: str, launch: Launch, text: str) -> list[str]:
    """What is amiss in the loops of a build called ``name``; nothing for kernels that are not Hopper's
    own.
    """
    if ".hopper." not in launch.kernel.__module__:
        return []
    found = trips(text)
    if launch.kernel.__name__ not in EXPECTED:
        return [f"has loops that nothing is expected of, {found}; EXPECTED has no {launch.kernel.__name__}"]
    expected = EXPECTED[launch.kernel.__name__]({**launch.arguments, **launch.blocks})
    if len(found) != len(expected):
        return [f"has {len(found)} loops with products; expected {len(expected)}"]
    of_any, of_this = (for_version(table, triton_version()) for table in (MOST, SPILLING))
    spills = of_this.get(name, of_any.get(launch.kernel.__name__, 0))
    # Versions of Triton write the loops of a kernel in different orders.
    orders = [zip(order, expected, strict=True) for order in permutations(found)]
    wrong = min(([x for pair in order for x in faults(*pair, spills)] for order in orders), key=len)
    return [f"{fault} ({count} of {len(found)} loops)" for fault, count in Counter(wrong).items()]


def faults(trip: Trip, expected: Loop, spills: int = 0) -> list[str]:
    """How a trip differs from what it should be; ``spills`` are allowed."""
    found = []
    if trip.products != expected.products:
        found.append(f"a trip has {trip.products} matrix instructions; expected {expected.products}")
    if trip.waits != expected.waits:
        found.append(f"a trip waits until {trip.waits} groups of products run; expected {expected.waits}")
    if expected.softmax and not trip.exponentials:
        found.append("a trip has no exponentials")
    if trip.late and expected.under_product:
        found.append(f"{trip.late} of {trip.exponentials} exponentials come after the wait for the product")
    if trip.spills > spills:
        found.append(f"a trip reads or writes the stack {trip.spills} times; expected {spills}")
    return found


class _Instruction(NamedTuple):
    text: str
    is_guarded: bool  # by a predicate
    target: int | None  # the place of the instruction that it may jump to


def trips(text: str) -> list[Trip]:
    """The quickest trip of each loop with products, of loops in loops the innermost."""
    code = _instructions(text)
    loops = {
        (x.target, at): path
        for at, x in enumerate(code)
        if x.target is not None and x.target < at and (path := _quickest(code, x.target, at))
    }
    multiplying = [(a, b) for a, b in loops if any(PRODUCT.match(x.text) for x in code[a : b + 1])]
    innermost = [
        (a, b)
        for a, b in multiplying
        if not any(a <= c and d <= b for c, d in multiplying if (a, b) != (c, d))
    ]
    return [_trip(loops[loop]) for loop in innermost]


def _instructions(text: str) -> list[_Instruction]:
    places, found = {}, []
    for match in LINE.finditer(text):
        if match["label"]:
            places[match["label"]] = len(found)
        else:
            found.append((match["code"], match["guard"] is not None))
    jumps = [JUMP.match(code) for code, _ in found]
    return [
        _Instruction(*x, places.get(jump[1]) if jump else None) for x, jump in zip(found, jumps, strict=True)
    ]


def _quickest(code: list[_Instruction], start: int, end: int) -> list[str]:
    """The fewest instructions from ``start`` to the jump back at ``end``; none where that jump is no loop's.

    Whoever waits for a tile does so behind the kernel, and jumps back to where the tile is there.
    """
    before, length = {}, {start: 0}  # by place: where the quickest way comes from, and how long it is
    for at in range(start, end):
        if at not in length:
            continue
        x, after = code[at], []
        if x.is_guarded or not LEAVES.match(x.text):
            after.append(at + 1)
        if x.target is not None and at < x.target <= end:
            after.append(x.target)
        for place in after:
            if length[at] + 1 < length.get(place, len(code)):
                before[place], length[place] = at, length[at] + 1
    if end not in length:
        return []
    path = [end]
    while path[-1] != start:
        path.append(before[path[-1]])
    return [code[at].text for at in reversed(path)]


def _trip(path: list[str]) -> Trip:
    waits = [(at, int(match[1], 16)) for at, x in enumerate(path) if (match := WAIT.match(x))]
    exponentials = [at for at, x in enumerate(path) if x.startswith("MUFU.EX2")]
    last = max((at for at, running in waits if running == 0), default=-1)
    return Trip(
        products=sum(bool(PRODUCT.match(x)) for x in path),
        waits=tuple(running for _, running in waits),
        exponentials=len(exponentials),
        late=sum(at > last for at in exponentials) if waits else 0,
        spills=sum(bool(re.match(r"(?:LDL|STL)\b", x)) for x in path),
    )
