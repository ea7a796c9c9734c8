"""The arithmetic of a printed loop, and the vectors that suit it.

LLVM takes vectors of 256 bits on Intel's processors with AVX-512, as wider ones lower the clock of some. A loop that
waits for memory loses 2 to 3 % with 512 bits. A loop that waits for its arithmetic gains: 1.45 times for `adam_atan2`
and `ftrl_proximal`, measured on a Cascade Lake with a tensor of 50 million numbers in float32.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from rulec.language.parse.located import syntax_tree

#: The instructions of words that have several, for a vector of float32, in machine code of AVX-512.
INSTRUCTIONS = {
    "exp": 18, "expm1": 23, "tanh": 24, "sigmoid": 24, "erf": 44, "log": 36, "log1p": 49, "power": 90, "cbrt": 29,
    "hypot": 14, "sign": 4, "root": 4, "inverse_root": 4, "remainder": 4,
    "minimum": 3, "maximum": 3,
}  # fmt: skip

#: The least arithmetic of a number in a loop with vectors of 512 bits. `adan` with 25 operations is slower with them,
#: `adam_atan2` with 91 and `ftrl_proximal` with 203 are faster. Loops of the library have at most 41 or at least 91.
WIDE = 60

#: The least number of operations that wait for one another in a loop whose vectors run side by side. One such operation
#: takes 4 cycles, and a Cascade Lake looks 224 instructions ahead. So n instructions with a chain of d take a turn in
#: 4*d*n/224 cycles, and their number alone takes n/2: they are equal at 28. `adam_atan2` has 63, and is 2.1 times as
#: fast side by side as in single vectors of 256 bits, 1.45 times without; `ftrl_proximal` has 12 and gains nothing.
DEEP = 40


def vector_lines(statements: Sequence[str]) -> list[str]:
    """The requests for vectors of a function, from its loop's statements for one number.

    No statement for a loop whose vectors LLVM chooses.
    """
    work, depth = arithmetic(statements)
    if work < WIDE:
        return []
    return ["vector_bits(512)", *["interleaved()"] * (depth >= DEEP)]


def arithmetic(statements: Sequence[str]) -> tuple[int, int]:
    """The number of operations in these statements, and the length of the longest chain of them.

    Functions of words count as the instructions that they have, and as one operation of a chain.
    """
    depths: dict[str, int] = {}
    work = 0
    for statement in syntax_tree("\n".join(statements)).body:
        instructions, depth = _counted(statement.value, depths)
        work += instructions
        if isinstance(statement, ast.Assign):
            depths[ast.unparse(statement.targets[0])] = depth
        depths[""] = max(depth, depths.get("", 0))
    return work, depths.get("", 0)


def _counted(value: ast.expr, depths: dict[str, int]) -> tuple[int, int]:
    """The operations of an expression, and the depth of its chain behind the variables of known depth."""
    if isinstance(value, ast.Name):
        return 0, depths.get(value.id, 0)
    parts = [_counted(part, depths) for part in ast.iter_child_nodes(value) if isinstance(part, ast.expr)]
    alone = _instructions(value)
    return sum(work for work, _ in parts) + alone, max((depth for _, depth in parts), default=0) + (alone > 0)


def _instructions(value: ast.expr) -> int:
    """The instructions of an expression beside those of its operands. Reads, writes and conversions count none."""
    if isinstance(value, ast.Call):
        word = ast.unparse(value.func)
        return 0 if word.startswith(("load_", "store_", "float")) else INSTRUCTIONS.get(word, 1)
    return int(isinstance(value, ast.BinOp | ast.UnaryOp | ast.Compare | ast.BoolOp))
