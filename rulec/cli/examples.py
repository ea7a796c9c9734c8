"""The examples that the help of a command ends with: lines for a shell, in a folder with `mine.yaml` of `rulec new`."""

from __future__ import annotations

from collections.abc import Mapping

#: Command -> its examples; "" is `rulec` itself.
EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "": ("rulec new mine", "rulec check mine.yaml", "rulec race mine.yaml adamw sgd"),
    "list": ("rulec list", "rulec list momentum", "rulec list 'adam*' --json"),
    "show": (
        "rulec show adamw", "rulec show 'clip_by_global_norm >> lookahead(adamw)' --backend triton",
        "rulec show lion --backend c --assembly",
    ),
    "check": ("rulec check mine.yaml", "rulec check adamw --dtype bfloat16", "rulec check 'adam + decay' --json"),
    "new": ("rulec new mine", "rulec new Wary --python", "rulec new SlowStart --package rulec-mylab"),
    "trace": ("rulec trace adamw", "rulec trace mine.yaml --steps 2 --shape 2x4", "rulec trace lamb --watch norms"),
    "diff": (
        "rulec diff 'adam + decay' --against adamw", "rulec diff adamw --against torch.optim.AdamW",
        "rulec diff adam --against torch.optim.Adam --steps 50 --json",
    ),
    "build": (
        "rulec build adamw -o out", "rulec build mine.yaml --bindings rust -o out/rust",
        "rulec build lion --backend triton -o out/triton",
    ),
    "bench": ("rulec bench start --quick", "rulec bench rules --rule lion --quick --json -"),
    "race": (
        "rulec race mine.yaml adamw sgd", "rulec race adamw lion --lr 1e-4:1 --task valley --html race.html",
        "rulec race mine.yaml --lr 1e-3 --seeds 5 --csv runs.csv",
    ),
    "play": ("rulec play", "rulec play mine.yaml", "rulec play 'lookahead(lion)' --port 0 --no-browser"),
    "memory": (
        "rulec memory --model config.json", "rulec memory --model config.json --rule adafactor --eager",
        "rulec memory --model config.json --mesh 8 --offload step --json",
    ),
    "demo": ("rulec demo", "rulec demo es --epochs 2 --out es"),
    "doctor": ("rulec doctor", "rulec doctor --json"),
    "schema": ("rulec schema", "rulec schema --output rule.schema.json"),
    "lsp": ("rulec lsp",),
    "cache": ("rulec cache info", "rulec cache clear --json"),
    "cache info": ("rulec cache info", "rulec cache info --json"),
    "cache clear": ("rulec cache clear", "rulec cache clear --json"),
}  # fmt: skip


def epilog(command: str = "") -> str:
    """The end of a command's help: its examples, on lines that are not wrapped."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in EXAMPLES[command])])
