"""Which instructions read what ptxas never wrote."""

import pytest
from compiled.sass import lost, reused

# The first two slices of a tile of values at UR10, as a product reads them; ptxas 12.8 wrote UR26 in place of
# UR10.
SLICES = """
        /*0020*/                   USGXT.U32 UR10, UR4, 0xe ;
        /*0030*/                   UMOV UR11, URZ ;
        /*0040*/                   UIADD3.X UR23, UR11, -0x7fffffe0, URZ, UP0, !UPT ;
        /*0050*/                   UMOV UR22, UR10 ;
        /*24a0*/                   UIADD3 UR26, UP0, UR10, 0x40, URZ ;
        /*2500*/                   UIADD3.X UR27, UR11, -0x7fffffe0, URZ, UP0, !UPT ;
.L_x_3:
        /*2510*/                   HGMMA.64x32x16.F32 R24, R4, gdesc[UR20].tnspB, R24 ;
        /*2520*/                   HGMMA.64x32x16.F32 R24, R8, gdesc[UR24].tnspB, R24, gsb0 ;
"""
LOST = SLICES.replace("UR26, UP0, UR10", "UR26, UP0, UR26").replace("UR27, UR11", "UR27, UR27")


def code(*instructions: str) -> str:
    lines = (f"        /*{16 * n:04x}*/                   {line} ;" for n, line in enumerate(instructions))
    return "\n".join(["forward:", *lines, ".L_x_0:", "        /*ff00*/                   BRA `(.L_x_0);"])


BEGUN = code("ULDC UR4, c[0x0][0x280]")


def test_a_descriptor_that_was_never_begun():
    assert lost(BEGUN + SLICES) == []
    assert lost(BEGUN + LOST) == [
        "UIADD3 UR26, UP0, UR26, 0x40, URZ ;",
        "UIADD3.X UR27, UR27, -0x7fffffe0, URZ, UP0, !UPT ;",
        "HGMMA.64x32x16.F32 R24, R8, gdesc[UR24].tnspB, R24, gsb0 ;",
    ]


def test_a_descriptor_made_of_something_else():
    """The register that should have been written held an argument of the kernel."""
    argument = code("ULDC UR4, c[0x0][0x280]", "ULDC.64 UR26, c[0x0][0x250]")
    assert lost(argument + SLICES) == []
    assert lost(argument + LOST) == ["HGMMA.64x32x16.F32 R24, R8, gdesc[UR24].tnspB, R24, gsb0 ;"]


@pytest.mark.parametrize(
    "lower",
    [
        ("ULOP3.LUT UR4, UR9, 0x3fff, URZ, 0xc0, !UPT",),
        ("ULOP3.LUT UR4, UR9, 0x7fff, URZ, 0xc0, !UPT",),
        ("USGXT.U32 UR4, UR9, 0xf",),
        ("R2UR UR4, R5",),
        ("USGXT.U32 UR8, UR9, 0xe", "UIADD3 UR4, UP0, UR8, 0x2, URZ"),
        (
            "USGXT.U32 UR8, UR9, 0xe",
            "ULOP3.LUT UR4, UR8, 0x4000000, URZ, 0xfc, !UPT",
        ),  # an offset to the next columns
        ("R2UR UR8, R5", "R2UR UR9, R6", "UIADD3.64 UR4, UR8, 0x2, URZ"),
    ],
)
def test_what_a_descriptor_is_made_of(lower):
    after = (
        "UMOV UR5, 0x40000040",
        "UMOV UR6, UR4",
        "UMOV UR7, UR5",
        "HGMMA.64x64x16.F32 R24, gdesc[UR4], !UPT",
    )
    assert lost(code("ULDC UR9, c[0x0][0x280]", *lower, *after)) == []


@pytest.mark.parametrize(
    ("writes", "read"),
    [
        (["UMOV UR4, URZ"], "UIADD3 UR4, UR4, 0x1, URZ"),
        (["@!UP0 UMOV UR4, URZ"], "@P0 IADD3 R2, R3, UR4, RZ"),
        (["ULDC.64 UR4, c[0x0][0x208]"], "LDG.E R2, desc[UR4][R2.64]"),
        (["ELECT P2, UR5, PT"], "IADD3 R2, R3, -UR5, RZ"),
        (["R2UR.FILL UR5, R6"], "IADD3 R2, R3, -UR5, RZ"),
        (["ULOP3.LUT UP0, UR15, URZ, 0x7fffffc0, URZ, 0xc0, !UPT"], "MOV R2, UR15"),
        (["UIMAD.WIDE UR6, URZ, 0x4, URZ"], "IMAD.U32 R2, RZ, RZ, UR7"),
        (["LDCU.128 UR8, c[0x0][0x380]"], "UISETP.NE.AND UP6, UPT, UR11, URZ, UPT"),
        (["UP2UR UR4, UPR, URZ, 0x40"], "UR2UP UPR, UR4"),
        (
            ["R2UR UR4, R1", "R2UR UR5, R2", "R2UR UR6, R3", "R2UR UR7, R4"],
            "HGMMA.64x64x16.F32 R24, gdesc[UR4]",
        ),
        (
            ["R2UR UR6, R3", "R2UR UR7, R4"],
            "HGMMA.64x64x16.F32 R24, R4, gdesc[UR4].tnspB, R24",
        ),  # the second pair alone
        (
            ["LDCU.128 UR4, c[0x0][0x380]"],
            "UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR4], tmem[UR6], idesc[UR7], UPT",
        ),
    ],
    ids=lambda x: x.split()[0] if isinstance(x, str) else None,
)
def test_every_register_of_a_read_is_written_before(writes, read):
    assert lost(code(*writes, read)) == []
    for n in range(len(writes)):
        assert lost(code(*writes[:n], *writes[n + 1 :], read)) == [f"{read} ;"]
    assert lost(code(read, *writes)) == [f"{read} ;"]


@pytest.mark.parametrize(
    "copies",
    [("UMOV UR5, UR9",), ("MOV.SPILL R4, UR9", "R2UR.FILL UR5, R4"), ("UMOV UR7, UR9", "UMOV UR5, UR7")],
)
def test_a_copy_of_nothing_is_nothing(copies):
    """ptxas copies pairs of registers of which one is written later."""
    read, whole = "IADD3 R2, R3, UR5, RZ", "UMOV UR5, 0x40004040"
    assert lost(code(*copies, read)) == [f"{read} ;"]
    assert lost(code(*copies, whole, read)) == lost(code("UMOV UR9, URZ", *copies, read)) == []


def test_a_function_behind_the_kernel_writes_what_it_returns():
    called = "CALL.REL.NOINC `($__internal_0_$__cuda_sm20_div_s64)"
    behind = "\n$__internal_0_$__cuda_sm20_div_s64:\n" + code("R2UR UR5, R3")
    read = "IMAD.U32 R9, RZ, RZ, UR5"
    assert lost(code(called, read) + behind) == []
    assert lost(code(read, called) + behind) == [f"{read} ;"]
    assert lost(code(called, "IMAD.U32 R9, RZ, RZ, UR7") + behind) == ["IMAD.U32 R9, RZ, RZ, UR7 ;"]


def test_a_register_that_saves_something_after_nothing():
    saves = "MOV.SPILL R4, UR9", "UMOV UR8, URZ", "MOV.SPILL R4, UR8", "R2UR.FILL UR5, R4"
    assert lost(code(*saves, "IADD3 R2, R3, UR5, RZ")) == []


def test_a_descriptor_that_nothing_was_copied_over():
    begun = "R2UR UR4, R5", "UMOV UR5, 0x40000040", "UMOV UR6, UR4", "UMOV UR7, UR5"
    product = "HGMMA.64x64x16.F32 R24, gdesc[UR4], !UPT"
    assert lost(code(*begun, product)) == []
    assert lost(code(*begun, "UMOV UR4, UR9", product)) == [f"{product} ;"]


@pytest.mark.parametrize(
    "plain",
    [
        "LDS.128 R8, [UR6+0x28400]",
        "STS.64 [UR9+0x28400], R6",
        "STS [UR9+0x28404], R6",
        "LDS.128 R8, [UR6+0x283f8]",
        "@P0 LDS.U8 R8, [UR6+0x28407]",
    ],
)
def test_a_barrier_where_other_things_lie(plain):
    """So were all of Hopper's backwards, where an mbarrier had no use."""
    made = "@!UP5 SYNCS.EXCH.64 URZ, [UR6+0x28400], UR10"
    assert len(reused(code(made, plain))) == len(reused(code(plain, made))) == 1
    assert reused(code(plain)) == []


@pytest.mark.parametrize(
    "beside",
    [
        "STS.64 [UR9+0x28408], R6",
        "LDS.128 R8, [UR6+0x283f0]",
        "STS.64 [R11+0x28400], R8",  # of each thread its own
        "SYNCS.ARRIVE.TRANS64 RZ, [UR6+0x28400], R2",
    ],
)
def test_a_barrier_beside_other_things(beside):
    assert reused(code("SYNCS.EXCH.64 URZ, [UR6+0x28400], UR10", beside)) == []
