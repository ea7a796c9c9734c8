"""The host's part of a file of CUDA C for a rule with matrices: a text with places for the parts of the rule."""

from __future__ import annotations

#: The part of the file for the host, as `cuda_host.HOST` is for rules that see no matrices.
HOST = """\
#ifndef __CUDACC_RTC__ /* what follows is for the host */

#include <cuda_runtime.h>

<words>
/* Hyper-parameters, which may change from step to step; and their defaults. */
typedef struct {
    <hyper>
} <name>_hyper;

#define <upper>_DEFAULTS {<defaults>}

/* One tensor: the addresses of its arrays in the memory of a GPU, its dimensions, the last of neighbours, and its
   numbers. A tensor has the states that the rule has for its shape; the others may be 0. */
typedef struct {
    <tensor>
} <name>_tensor;

<enums>

/* The plan of a step: `words` of 64 bits that <name>_fill writes, and bytes of `scratch` memory on the GPU that nothing
   else may use until the step is done. Tables begin at some words, and have some lines. */
typedef struct {
    long long words, scratch, count, at[<upper>_TABLES], lines[<upper>_TABLES];
    <rounds>
} <name>_plan;

/* A tensor as the rule sees it: `batch` matrices of `rows` and `cols`, which are lines of `width` neighbours. */
typedef struct {
    long long kind, batch, rows, cols, height, width, size;
} <name>_view;

/* A tensor in blocks: parts of `wide` neighbours in `tall` lines, `across` side by side and `deep` below each other. */
typedef struct {
    long long batch, height, width, wide, tall, across, deep, lanes, blocks;
} <name>_cut;

static <name>_view <name>_viewed(const <name>_tensor *tensor)
{
    <name>_view view = {-1, 1, 1, 1, 0, 0, 1};
    for (long long d = 0; d < tensor->ndim; ++d)
        view.size *= tensor->shape[d];
    if (tensor->ndim < 2) {
        view.cols = view.size;
    } else {
        <viewed>
    }
    <oriented>
    <kinds>
    return view;
}

/* The least whole number of parts. */
static long long <name>_parts(long long length, long long part)
{
    return (length + part - 1) / part;
}

<cutters>
/* The next `bytes` of the scratch memory. */
static long long <name>_room(long long *at, long long bytes)
{
    const long long here = *at;
    *at += <name>_parts(bytes, 16) * 16;
    return here;
}

<writers>
<matrices>
<each>
/* Plans a step of tensors: call it again where a shape has changed. Returns 0, or 1 more than the place of the first
   tensor whose shape the rule is not for. */
extern "C" long long <name>_prepare(long long count, const <name>_tensor *tensors, <name>_plan *plan)
{
    static const long long widths[] = {<widths>};
    const <name>_plan empty = {};
    *plan = empty;
    plan->count = count;
    <totals_room>
    for (long long i = 0; i < count; ++i) {
        const <name>_view view = <name>_viewed(tensors + i);
        switch (view.kind) {
        <counted>
        default:
            return i + 1;
        }
    }
    for (int k = 0; k < <upper>_TABLES; ++k) {
        plan->at[k] = plan->words;
        plan->words += widths[k] * plan->lines[k];
    }
    return 0;
}

/* Writes the tables of a step into memory of the host, best pinned, and counts the step: copy them to the GPU with
   cudaMemcpyAsync, once, and call <name>_step there. */
extern "C" void <name>_fill(
    <name>_plan *plan, <name>_tensor *tensors, const <name>_hyper *hyper, void *scratch, long long *words)
{
    long long *next[<upper>_TABLES], done[<kind_count>] = {}, at = (long long)scratch;
    for (int k = 0; k < <upper>_TABLES; ++k)
        next[k] = words + plan->at[k];
    <begun>
    <totals>
    for (long long i = 0; i < plan->count; ++i) {
        const <name>_view view = <name>_viewed(tensors + i);
        switch (view.kind) {
        <filled>
        }
        tensors[i].step += 1;
    }
}

template <typename Kernel>
static cudaError_t <name>_launch(
    cudaError_t error, Kernel *kernel, long long blocks, void **arguments, cudaStream_t stream)
{
    if (error != cudaSuccess || blocks == 0)
        return error;
    return cudaLaunchKernel(kernel, dim3((unsigned)blocks), dim3(<threads>), arguments, 0, stream);
}

/* One step, in a stream: `words` are those of <name>_fill on the GPU. Returns the first error of a launch; no launch
   follows it. */
extern "C" cudaError_t <name>_step(const <name>_plan *plan, long long *words, cudaStream_t stream)
{
    const bool *stays = 0;
    const float *scale = 0;
    <arguments>
    cudaError_t error = cudaSuccess;
    <launches>
    return error;
}

#endif
"""

#: The functions for chunks of neighbours and for tiles of matrices, that write them, and that join reductions: each by
#: its use.
FUNCTIONS = {
    "_chunks(view": """\
/* Chunks of neighbouring elements. */
static <name>_cut <name>_chunks(const <name>_view *view)
{
    const long long blocks = <name>_parts(view->size, <elements>);
    const <name>_cut cut = {1, 1, view->size, <elements>, 1, blocks, 1, 1, blocks};
    return cut;
}
""",
    "_tiles(view": """\
/* Tiles of matrices, whose threads take `pack` neighbours at a time. Where `columns` are reduced, a tile is as wide as
   one pack for each of its lanes; it lies in one matrix where matrices are kept `apart`. */
static <name>_cut <name>_tiles(const <name>_view *view, long long pack, bool columns, bool apart)
{
    <name>_cut cut = {apart ? view->batch : 1, apart ? view->height : view->batch * view->height, view->width};
    cut.lanes = 1;
    while (cut.lanes < 32 && cut.lanes * pack < view->width)
        cut.lanes *= 2;
    const long long once = cut.lanes * pack, most = <widest> / once, packs = <name>_parts(view->width, once);
    cut.wide = columns || packs < 1 || most < 1 ? once : once * (packs < most ? packs : most);
    const long long narrow = cut.wide < view->width ? cut.wide : view->width, together = <threads> / cut.lanes;
    const long long full = <tile_size> / (narrow > 1 ? narrow : 1), least = <name>_parts(view->height, <pieces>);
    const long long turns = <name>_parts(full > least ? full : least, together);
    cut.tall = together * (turns > 1 ? turns : 1);
    cut.across = <name>_parts(cut.width, cut.wide);
    cut.deep = <name>_parts(cut.height, cut.tall);
    cut.blocks = cut.batch * cut.across * cut.deep;
    return cut;
}
""",
    "_fill_chunks(": """\
static long long *<name>_fill_chunks(long long *words, const <name>_cut *cut, long long tensor)
{
    for (long long block = 0; block < cut->blocks; ++block, words += <chunk>) {
        const long long start = cut->wide * block;
        words[0] = tensor;
        words[1] = start;
        words[2] = start + cut->wide < cut->width ? start + cut->wide : cut->width;
        words[3] = block;
    }
    return words;
}
""",
    "_fill_tiles(": """\
static long long *<name>_fill_tiles(long long *words, const <name>_cut *cut, long long tensor)
{
    for (long long block = 0; block < cut->blocks; ++block, words += <tile>) {
        const long long beside = block % cut->across, below = block / cut->across % cut->deep;
        const long long matrix = block / cut->across / cut->deep, above = matrix * cut->height;
        const long long left = beside * cut->wide, top = below * cut->tall;
        words[0] = tensor;
        words[1] = matrix;
        words[2] = cut->width;
        words[3] = above + top;
        words[4] = above + (top + cut->tall < cut->height ? top + cut->tall : cut->height);
        words[5] = left;
        words[6] = left + cut->wide < cut->width ? left + cut->wide : cut->width;
        words[7] = cut->lanes;
        words[8] = beside * cut->batch * cut->height;
        words[9] = below * cut->batch * cut->width;
        words[10] = block;
    }
    return words;
}
""",
    "_fill_joins(": """\
/* The lines that join `terms` times `count` totals, side by side, to `count` results. */
static long long *<name>_fill_joins(
    long long *words, long long source, long long target, long long count, long long terms, int kind)
{
    for (long long done = 0; done < count; done += <threads>, words += <finish_line>) {
        words[0] = source + 8 * done;
        words[1] = target + 8 * done;
        words[2] = count - done < <threads> ? count - done : <threads>;
        words[3] = count;
        words[4] = terms;
        words[5] = kind;
    }
    return words;
}
""",
}

#: The functions of a kind of tensors.
KIND = """\
/* <about> */
static void <name>_cuts_<kind>(const <name>_view *view, <name>_cut *cuts)
{
    <cuts>
}

/* Where what lives in a step alone lies for a tensor, from `at` on. Returns the end. */
static long long <name>_places_<kind>(
    const <name>_view *view, const <name>_cut *cuts, long long at, long long *places)
{
    const long long batch = view->batch, rows = view->rows, cols = view->cols;
    <rooms>
    return at;
}

static void <name>_count_<kind>(const <name>_view *view, <name>_plan *plan)
{
    <name>_cut cuts[<cut_count>];
    long long places[<place_count>];
    <name>_cuts_<kind>(view, cuts);
    plan->scratch = <name>_places_<kind>(view, cuts, plan->scratch, places);
    <lines>
}

/* Writes the lines of a tensor, which is the one at `place` of its kind and at `index` of all. */
static long long <name>_fill_<kind>(
    <name>_plan *plan, <name>_tensor *tensor, const <name>_view *view, const <name>_hyper *hyper, long long index,
    long long place, long long at, long long **next)
{
    <name>_cut cuts[<cut_count>];
    long long places[<place_count>];
    <name>_cuts_<kind>(view, cuts);
    at = <name>_places_<kind>(view, cuts, at, places);
    long long *const bound = next[<upper>_BOUND_<kind>], *const per_call = next[<upper>_PER_CALL_<kind>];
    double *const row = (double *)next[<upper>_TABLE_<kind>];
    <words>
    per_call[0] = place;
    per_call[1] = ((<every>) & 15) == 0;
    per_call[<even>] = per_call[1] && view->width % <pack> == 0;
    <scalars>
    <stores>
    <tables>
    next[<upper>_BOUND_<kind>] += <bounds>;
    next[<upper>_PER_CALL_<kind>] += <givens>;
    next[<upper>_TABLE_<kind>] += <columns>;
    return at;
}
"""
