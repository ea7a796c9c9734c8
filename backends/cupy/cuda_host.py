"""The host's part of a file of CUDA C, as a text with places for what a rule needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: Elements that a block of threads takes.
ELEMENTS = 8192

#: The part of the file for the host: `<part>` alone in a line stands for lines, and elsewhere for a text.
HOST = """\
#ifndef __CUDACC_RTC__ /* what follows is for the host */

#include <cuda_runtime.h>

<words>
/* Hyper-parameters, which may change from step to step; and their defaults. */
typedef struct {
    <hyper>
} <name>_hyper;

#define <upper>_DEFAULTS {<defaults>}

/* One tensor: the addresses of its arrays in the memory of a GPU, its elements, and its numbers. */
typedef struct {
    <tensor>
} <name>_tensor;

<shared>
/* The 64-bit words that <name>_fill writes for these tensors. */
extern "C" long long <name>_words(long long count, const <name>_tensor *tensors)
{
    long long blocks = 0;
    for (long long i = 0; i < count; ++i)
        blocks += (tensors[i].size + <elements> - 1) / <elements>;
    return <chunk> * blocks + <line> * count;
}

<scratch>
template <typename Kernel>
static cudaError_t <name>_launch(Kernel *kernel, long long blocks, void **arguments, cudaStream_t stream)
{
    if (blocks == 0)
        return cudaSuccess;
    return cudaLaunchKernel(kernel, dim3((unsigned)blocks), dim3(<threads>), arguments, 0, stream);
}

<work>
#endif
"""

#: The function that writes the tables of a step, or of a move of the parameters, and the one that launches its kernels.
WORK = """\
<comment>
<fill>
{
    const long long blocks = (<name>_words(count, tensors) - <line> * count) / <chunk>;
    long long *chunk = words, *bound = words + <chunk> * blocks, *per_call = bound + <bounds> * count;
    double *row = (double *)(per_call + <givens> * count);
    <finish>
    for (long long i = 0; i < count; ++i, bound += <bounds>, per_call += <givens>, row += <columns>) {
        <const><name>_tensor *const tensor = tensors + i;
        <first>
        for (long long start = 0; start < tensor->size; start += <elements>, chunk += <chunk>) {
            chunk[0] = i;
            chunk[1] = start;
            chunk[2] = start + <elements> < tensor->size ? start + <elements> : tensor->size;
            chunk[3] = <slot>;
        }
        <addresses>
        per_call[0] = i;
        per_call[1] = ((<every>) & 15) == 0;
        <joins>
        <scalars>
        <stores>
        <counted>
    }
    <counts>
    return blocks;
}

<about>
extern "C" cudaError_t <function>(<words_type> *words, long long count, long long blocks, cudaStream_t stream)
{
    <words_type> *bound = words + <chunk> * blocks, *per_call = bound + <bounds> * count;
    <tables>
    const bool *stays = 0;
    const float *scale = 0;
    void *arguments[] = {&words, &bound, &per_call, &table, &stays, &scale};
    <launches>
}
"""

#: The comments on the two functions of a step.
STEP = (
    """\
/* Writes the tables of a step into memory of the host, best pinned, and counts the step: copy them to the GPU with
   cudaMemcpyAsync, once, and call <function> there. Returns the number of blocks. */
""",
    """\
/* One step, in a stream: `words` are those of <name>_fill on the GPU, and <count_of> are its tensors and blocks.
   Returns the first error of a launch. */
""",
)

#: The comments on the two functions of a move, by its word.
MOVES = {
    "to_evaluation": ("""\
/* Writes the tables of <function>, as <name>_fill writes those of a step; no step is counted. */
""", """\
/* Moves the parameters from where the model is trained to where it is evaluated, before evaluation and checkpoints. */
"""),
    "to_training": ("""\
/* Writes the tables of <function>, as <name>_fill writes those of a step; no step is counted. */
""", """\
/* Moves the parameters back to where the model is trained, before the next step. */
"""),
}  # fmt: skip

#: The function for the size of the memory for reductions.
SCRATCH = """\
/* The bytes of memory on the GPU for the reductions of these tensors: <name>_fill takes its address, and nothing else
   may use it until the step is done. */
extern "C" long long <name>_scratch(long long count, const <name>_tensor *tensors)
{
    return 8 * <results> * ((<name>_words(count, tensors) - <line> * count) / <chunk> + count);
}
"""

#: The statements that write a tensor's words for its reductions.
JOINS = """\
for (long long r = 0; r < <results>; ++r) {
    long long *const line = finish + <finish_line> * (r * count + i);
    bound[<slots> + r] = (long long)(scratch + r * blocks);
    line[0] = (long long)(scratch + r * blocks + (first - words) / <chunk>);
    line[1] = (long long)(scratch + <results> * blocks + r * count + i);
    line[2] = line[3] = 1;
    line[4] = (chunk - first) / <chunk>;
    line[5] = kinds[r];
}
"""


def filled_c(template: str, known: Mapping[str, str], parts: Mapping[str, Sequence[str]]) -> list[str]:
    """The lines of a template: `<part>` alone in a line stands for lines, and elsewhere for a text."""
    lines: list[str] = []
    for line in template.rstrip("\n").split("\n"):
        part, margin = line.strip()[1:-1], line[: len(line) - len(line.lstrip())]
        alone = line.strip() == f"<{part}>" and part in parts
        for text in [f"{margin}{x}".rstrip() for x in parts[part]] if alone else [line]:
            for name, value in known.items():
                text = text.replace(f"<{name}>", value)
            lines.append(text)
    return lines
