"""The coefficients of `newton_schulz`, the odd polynomial a*x + b*x**3 + c*x**5 of each iteration, and its two forms.

An iteration after the last of a schedule has the last one's polynomial.

The `direct` form multiplies the matrix in every iteration. The `gram` form multiplies it once in two: the polynomial of
the next iteration is of the Gram matrix after it, `p*G*p` for the symmetric `p` of this one. Then the Gram matrix is
formed anew, before its errors grow. In between, errors of small eigenvalues grow with the square of a polynomial's
slope at 0, so two iterations in 16 bits need float16: bfloat16 has too few digits for the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rulec.language.expr.static import GRAM

Polynomial = tuple[float, float, float]
Coefficients = tuple[Polynomial, ...]

#: Amsel and others, 2025, Algorithm 1: https://arxiv.org/abs/2505.16932. Each is the best for the range of singular
#: values that the one before it leaves.
_POLAR_EXPRESS: Coefficients = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_TAYLOR: Polynomial = (1.875, -1.25, 0.375)


def _at(row: Polynomial, divisor: float) -> Polynomial:
    """The polynomial of x/divisor."""
    a, b, c = row
    return a / divisor, b / divisor**3, c / divisor**5


SCHEDULES: Mapping[str, Coefficients] = {
    # Jordan and others, 2024: https://kellerjordan.github.io/posts/muon/
    "muon": ((3.4445, -4.7750, 2.0315),),
    # The two classical iterations, which converge to an orthogonal matrix.
    "cubic": ((1.5, -0.5, 0.0),),
    "taylor": (_TAYLOR,),
    # You, 2025, in modded-nanogpt; HeavyBall's and pytorch_optimizer's.
    "quintic": (
        (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # As in the paper, all but the last are taken at x/1.01: singular values that rounding makes larger than 1 shrink.
    "polar_express": (*(_at(row, 1.01) for row in _POLAR_EXPRESS), _TAYLOR),
    # The same for other ranges, both pytorch_optimizer's: with a margin of 1 in 100 (its "polar_express"), and of 2 in
    # 100 (its "polar_express_safer").
    "polar_express_safe": (
        (8.237312490495555, -23.157747414558198, 16.680568411445915),
        (4.082441999064835, -2.893047735332586, 0.5252849256975648),
        (3.9263479922546582, -2.8547468034765298, 0.5318022422894988),
        (3.2982187133085143, -2.424541981026706, 0.48632008358844075),
        (2.2970369434552573, -1.63662558125903, 0.4002628455953627),
        (1.8763805351440397, -1.2347896577722228, 0.35891887501668385),
        (1.8564423485617974, -1.2132449880935525, 0.3568003487825883),
        (1.8749994008682747, -1.2499988017229169, 0.3749994008546422),
    ),
    "polar_express_safer": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.0429299351667245, -2.808917465908704, 0.5000178451051299),
        (3.8916678022926563, -2.7724841532176825, 0.5060648178503389),
        (3.285753657755658, -2.3681294933425394, 0.46449024233003117),
        (2.3005307116270983, -1.6111665557258408, 0.3833374427545273),
        (1.8631210546382593, -1.2042160621002727, 0.3421879560523383),
        (1.8382572152247512, -1.1779263289537742, 0.3396513038637379),
        (1.8749999923301852, -1.2499999836060613, 0.374999991275876),
    ),
    # modded-nanogpt's five. The first four are those with a margin of 2 in 100; the last is for five iterations, and
    # takes singular values less far. Its code divides by 1.02 times the norm.
    "modded_nanogpt": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
}  # fmt: skip


def coefficients_of(schedule: str | Coefficients, steps: int) -> Coefficients:
    """The coefficients of this many iterations of a schedule, by its name or its numbers."""
    rows = SCHEDULES[schedule] if isinstance(schedule, str) else schedule
    return tuple(rows[min(i, len(rows) - 1)] for i in range(steps))


def in_blocks(coefficients: Coefficients, form: str, rows: int, cols: int) -> tuple[Coefficients, ...]:
    """The iterations between two products with the matrix: of a square one each alone, for two save nothing there."""
    size = 2 if form == GRAM and rows != cols else 1
    return tuple(coefficients[k : k + size] for k in range(0, len(coefficients), size))


def iterated_in(dtype: str | None, form: str) -> str | None:
    """The dtype of the iteration, for the dtype of its operand and its result."""
    return "float16" if form == GRAM and dtype == "bfloat16" else dtype


class ProductCounts(NamedTuple):
    """The numbers of products in some iterations: Gram matrices, other products of symmetric matrices, and long ones.

    A Gram matrix is symmetric too. The long ones multiply the matrix itself.
    """

    gram: int
    symmetric: int
    long: int


def product_counts(rows: float, cols: float, steps: float, form: str) -> ProductCounts:
    """The products of so many iterations of a matrix."""
    pairs = int(steps // 2) if form == GRAM and rows != cols else 0
    alone = int(steps) - 2 * pairs
    return ProductCounts(pairs + alone, 5 * pairs + alone, pairs + alone)


def multiplications(rows: float, cols: float, steps: float, form: str, symmetric_share: float = 1.0) -> float:
    """The multiplications of so many iterations, with a share of those of whole symmetric products."""
    short, long = sorted((rows, cols))
    counts = product_counts(rows, cols, steps, form)
    symmetric = counts.gram * short * short * long + counts.symmetric * short**3
    return float(symmetric_share * symmetric + counts.long * short * short * long)
