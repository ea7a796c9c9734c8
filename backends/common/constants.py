"""The formats float32 and float64, and the constants of elementary functions in them.

The polynomials are minimax fits (Remez, 90 digits, the relative error of the whole function as the measure) on the
stated intervals. The error of each is below 1/20 of an ulp of its function.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: its width, and the bits of its fraction and exponent bias."""

    name: str
    bits: int
    fraction: int
    bias: int

    def pattern(self, value: float) -> int:
        """The bit pattern of `value` rounded to this format, as an unsigned integer."""
        code = "<f" if self.bits == 32 else "<d"
        return int.from_bytes(struct.pack(code, value), "little")

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def largest(self) -> float:
        return (2.0 - 2.0**-self.fraction) * 2.0**self.bias

    @property
    def lift(self) -> int:
        """The exponent of a factor 2**lift for making subnormal numbers normal.

        It is a multiple of three: cube roots scale back exactly.
        """
        return 24 if self.bits == 32 else 54


SINGLE = Format("float32", 32, 23, 127)
DOUBLE = Format("float64", 64, 52, 1023)


@dataclass(frozen=True)
class Table:
    """The constants of one format.

    `ln2_high` has few bits: its product with any exponent is exact. `ln2_low` is log 2 - `ln2_high`.
    """

    ln2_high: float
    ln2_low: float
    exp: tuple[float, ...]  # (exp(r) - 1 - r)/r**2 on |r| <= log(2)/2
    log: tuple[float, ...]  # (log((1+s)/(1-s)) - 2s)/s**3 in s**2, s <= 0.1716
    power: tuple[float, ...]  # T or, for float64, (T - 1/12)/q**2; T = (log((2+q)/(2-q)) - q)/q**3 in q**2, q <= 0.3432
    erf: tuple[float, ...]  # erf(x)/x - 1 in x**2, x <= 1
    log_erfc: tuple[float, ...]  # log(erfc(x)) in x, 1 <= x <= erf_one
    cbrt: tuple[
        float, ...
    ]  # ((1 - e)**(-1/3) - 1)/e in e, |e| <= 0.1021; with half the precision, for Newton doubles it
    sine: tuple[float, ...]  # sin(pi/2*r)/r in r**2, |r| <= 1/2
    cosine: tuple[float, ...]  # (cos(pi/2*r) - 1)/r**2 in r**2, |r| <= 1/2
    erf_one: float  # from here on erf rounds to 1
    exp_low: float  # below, exp rounds to 0
    exp_high: float  # above, exp overflows
    tanh_one: float  # from here on tanh rounds to 1


TABLES = {
    SINGLE: Table(
        ln2_high=0.693145751953125,
        ln2_low=1.4286068203094173e-06,
        exp=(
            0.49999993432139045,
            0.16666520399084747,
            0.04166839078423684,
            0.008368745106661586,
            0.0013814540063843824,
        ),
        log=(0.6666677648207064, 0.39977527787189343, 0.29872131362481374),
        power=(0.0833333320552592, 0.012500104843644807, 0.002229475581817581, 0.00046059721345509933),
        erf=(
            0.12837916572673,
            -0.3761262582430296,
            0.11283585148789106,
            -0.02685381192925081,
            0.005188327658039149,
            -0.0008010193279185208,
            7.85385994935249e-05,
        ),
        log_erfc=(
            -0.0003537192585830258,
            -1.1270400366782367,
            -0.6382256766460926,
            -0.10303736884495113,
            0.021805318161992004,
            -0.0029396072100432236,
            0.00018557399538845714,
        ),
        cbrt=(0.33332763711832714, 0.22347497789296925, 0.1746982071771957),
        sine=(1.5707963217083494, -0.6459634602332395, 0.07968003276892678, -0.004601657888247082),
        cosine=(-1.2337005425976717, 0.2536692259655355, -0.020860165111403838, 0.0009037665425451274),
        erf_one=4.0,
        exp_low=-104.0,
        exp_high=89.0,
        tanh_one=9.5,
    ),
    DOUBLE: Table(
        ln2_high=float.fromhex("0x1.62e42fee00000p-1"),
        ln2_low=float.fromhex("0x1.a39ef35793c76p-33"),
        exp=(
            0.500000000000001,
            0.16666666666666674,
            0.041666666666521524,
            0.008333333333322172,
            0.0013888888947962543,
            0.00019841269886699926,
            2.4801487165838708e-05,
            2.755724221351069e-06,
            2.7632716110097873e-07,
            2.511009630403349e-08,
        ),
        log=(
            0.6666666666666734,
            0.3999999999941362,
            0.285714287426476,
            0.2222219854418441,
            0.18183565946001687,
            0.15314006387482218,
            0.14796417489028893,
        ),
        power=(
            0.012500000000000707,
            0.0022321428570388755,
            0.00043402778359931437,
            8.877824382112672e-05,
            1.8782664636075347e-05,
            4.045648513429669e-06,
            1.006826556557312e-06,
        ),
        erf=(
            0.12837916709551257,
            -0.3761263890318375,
            0.11283791670954857,
            -0.026866170645072896,
            0.005223977624780875,
            -0.0008548326978742595,
            0.00012055331036911085,
            -1.4925593507102268e-05,
            1.6460972819481492e-06,
            -1.6350025239598178e-07,
            1.4657879901296016e-08,
            -1.1365666000861305e-09,
            5.945261529824205e-11,
        ),
        log_erfc=(
            -1.8436798688451823e-07,
            -1.1283772825675888,
            -0.6366287029493783,
            -0.10274664480815672,
            0.019076959685816984,
            0.0002822222471205123,
            -0.0017709180769496088,
            0.0006428270286730828,
            -4.5951115401752276e-05,
            -6.975323766314502e-05,
            4.477120171341802e-05,
            -1.642194599655323e-05,
            4.301910240417086e-06,
            -8.452209204962656e-07,
            1.2483537979439865e-07,
            -1.3522759954144142e-08,
            1.017089937663272e-09,
            -4.751916344982934e-11,
            1.039096780493541e-12,
        ),
        cbrt=(
            0.33333334551886307,
            0.22222225541827448,
            0.1728299543529133,
            0.14401756774506444,
            0.12667150096415036,
            0.11309414222409839,
        ),
        sine=(
            1.5707963267948966,
            -0.6459640975062443,
            0.07969262624603957,
            -0.00468175413228242,
            0.00016044115029166428,
            -3.598641754487236e-06,
            5.633721016484235e-08,
        ),
        cosine=(
            -1.2337005501361697,
            0.2536695079010468,
            -0.02086348076331257,
            0.0009192602741910676,
            -2.520203678829255e-05,
            4.7106096694433236e-07,
            -6.321202078611154e-09,
        ),
        erf_one=6.0,
        exp_low=-746.0,
        exp_high=710.0,
        tanh_one=20.0,
    ),
}
