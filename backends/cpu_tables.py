"""The constants of `cpu_math`, for float32 and float64.

The polynomials are minimax fits (Remez, 90 digits, the relative error of the whole function as the measure) on the
intervals stated beside them; each leaves an error below 1/20 of an ulp of the function it serves.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cpu_lanes import DOUBLE, SINGLE


@dataclass(frozen=True)
class Table:
    """The constants of one format.

    `ln2_high` has so few bits that its product with any exponent is exact; `ln2_low` is what it lacks of log 2, and
    `two_thirds_low` what two thirds rounded to the format lacks.
    """

    ln2_high: float
    ln2_low: float
    two_thirds_low: float
    exp: tuple[float, ...]  # (exp(r) - 1 - r)/r**2 on |r| <= log(2)/2
    log: tuple[float, ...]  # (log((1+s)/(1-s)) - 2s)/s**3 in s**2, s <= 0.1716
    power: tuple[float, ...]  # ((log((1+s)/(1-s)) - 2s)/s**3 - 2/3)/s**2 in s**2, s <= 0.1716
    erf: tuple[float, ...]  # erf(x)/x - 1 in x**2, x <= 1
    erfc: tuple[float, ...]  # exp(x**2)*erfc(x) in (x - 2)/(x + 2), 1 <= x <= erf_one
    erf_one: float  # from here on erf rounds to 1
    exp_low: float  # below, exp rounds to 0
    exp_high: float  # above, exp overflows
    tanh_one: float  # from here on tanh rounds to 1


TABLES = {
    SINGLE: Table(
        ln2_high=0.693359375,
        ln2_low=-2.1219444005469057e-4,
        two_thirds_low=-1.9868214925130207e-08,
        exp=(
            0.5000000081043168,
            0.1666666675667091,
            0.041666239859114496,
            0.008333285931483048,
            0.0013948640637153269,
            0.00019907637995300235,
        ),
        log=(0.6666677648207064, 0.39977527787189343, 0.29872131362481374),
        power=(0.4000015231568608, 0.28547118745920297, 0.2341894750026563),
        erf=(
            0.12837916572673,
            -0.3761262582430296,
            0.11283585148789106,
            -0.02685381192925081,
            0.005188327658039149,
            -0.0008010193279185208,
            7.85385994935249e-05,
        ),
        erfc=(
            0.25539567791314577,
            -0.4271858534938065,
            0.24165727023350317,
            -0.07898690600760763,
            0.0037297388815980045,
            0.007212550416789359,
        ),
        erf_one=4.0,
        exp_low=-104.0,
        exp_high=89.0,
        tanh_one=9.5,
    ),
    DOUBLE: Table(
        ln2_high=float.fromhex("0x1.62e42fee00000p-1"),
        ln2_low=float.fromhex("0x1.a39ef35793c76p-33"),
        two_thirds_low=3.700743415417188e-17,
        exp=(
            0.5,
            0.16666666666666682,
            0.041666666666666095,
            0.008333333333316982,
            0.0013888888889116394,
            0.00019841269896517287,
            2.4801586925661706e-05,
            2.755723472586574e-06,
            2.755758232495889e-07,
            2.5112085131019884e-08,
            2.0826570710463408e-09,
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
            0.4000000000000226,
            0.28571428570097607,
            0.22222222520284896,
            0.18181784334566753,
            0.15386758869872924,
            0.1325678104880634,
            0.13196677042108,
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
        erfc=(
            0.25539567631050575,
            -0.4271858474139568,
            0.2416581942424688,
            -0.07897858101641561,
            0.0037328923985397136,
            0.006997461785664143,
            -0.0008471425905096823,
            -0.0009819764795507078,
            4.353615970907321e-05,
            0.0001742884710984084,
            2.7623189695265233e-05,
            -2.66114758688225e-05,
            -1.2644093449352277e-05,
        ),
        erf_one=6.0,
        exp_low=-746.0,
        exp_high=710.0,
        tanh_one=20.0,
    ),
}
