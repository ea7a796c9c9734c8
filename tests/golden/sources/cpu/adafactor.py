"""Adafactor: the cpu kernel for p:f32 g:f32 r:f32 c:f32, 3 stages. Printed by rulec."""

from rulec_backends.cpu.words import (
    accumulate, compiled, fetch_add, float32, float64, inlined, load_float32, load_float64, minimum, number,
    store_float32, store_float64, word,
)


@inlined
def element_0(p, g):
    """The new values of one element."""
    x0 = g * g
    return x0, x0, p * p


@inlined
def element_1(g, a, b, one_over_eps1):
    """The new values of one element."""
    u = g * minimum(a * b, one_over_eps1)
    return u * u,


@compiled
def stage_0(pointers, tensors, tensor, row, chunk, place):
    """One chunk: reduces to sum_g_squared_row, sum_g_squared_col, sum_p_squared per tensor. Buffers do not
    overlap.
    """
    first, last = word(place, 1), word(place, 2)
    height, width = word(place, 3), word(place, 4)
    top, bottom = word(place, 5), word(place, 6)
    left, right = word(place, 7), word(place, 8)
    p_at = word(pointers, tensor)
    g_at = word(pointers, tensors + tensor)
    sum_g_squared_row_at = word(pointers, 4 * tensors + tensor) + 8 * word(place, 9)
    sum_g_squared_col_at = word(pointers, 5 * tensors + tensor) + 8 * word(place, 10)
    sum_p_squared_at = word(pointers, 6 * tensors + tensor)
    sum_p_squared = 0.0
    for matrix in range(first, last):
        for j in range(matrix * width + left, matrix * width + right):
            store_float64(sum_g_squared_col_at, j, 5, float64(0.0))
        alone = bottom - (bottom - top) % 4 if right - left > 2048 else top
        for line in range(matrix * height + top, matrix * height + alone, 4):
            back_0 = (line + 0 - matrix) * width
            back_1 = (line + 1 - matrix) * width
            back_2 = (line + 2 - matrix) * width
            back_3 = (line + 3 - matrix) * width
            sum_g_squared_row_0 = 0.0
            sum_g_squared_row_1 = 0.0
            sum_g_squared_row_2 = 0.0
            sum_g_squared_row_3 = 0.0
            for j in range(matrix * width + left, matrix * width + right):
                i = j + back_0
                p = load_float32(p_at, i, 0)
                g = load_float32(g_at, i, 1)
                new_0 = element_0(p, g)
                sum_g_squared_row_0 = accumulate(sum_g_squared_row_0, new_0[0])
                sum_p_squared = accumulate(sum_p_squared, new_0[2])
                i = j + back_1
                p = load_float32(p_at, i, 0)
                g = load_float32(g_at, i, 1)
                new_1 = element_0(p, g)
                sum_g_squared_row_1 = accumulate(sum_g_squared_row_1, new_1[0])
                sum_p_squared = accumulate(sum_p_squared, new_1[2])
                i = j + back_2
                p = load_float32(p_at, i, 0)
                g = load_float32(g_at, i, 1)
                new_2 = element_0(p, g)
                sum_g_squared_row_2 = accumulate(sum_g_squared_row_2, new_2[0])
                sum_p_squared = accumulate(sum_p_squared, new_2[2])
                i = j + back_3
                p = load_float32(p_at, i, 0)
                g = load_float32(g_at, i, 1)
                new_3 = element_0(p, g)
                sum_g_squared_row_3 = accumulate(sum_g_squared_row_3, new_3[0])
                sum_p_squared = accumulate(sum_p_squared, new_3[2])
                column_total = load_float64(sum_g_squared_col_at, j, 5)
                column_total = column_total + float64(new_0[1])
                column_total = column_total + float64(new_1[1])
                column_total = column_total + float64(new_2[1])
                column_total = column_total + float64(new_3[1])
                store_float64(sum_g_squared_col_at, j, 5, column_total)
            store_float64(sum_g_squared_row_at, line + 0, 4, sum_g_squared_row_0)
            store_float64(sum_g_squared_row_at, line + 1, 4, sum_g_squared_row_1)
            store_float64(sum_g_squared_row_at, line + 2, 4, sum_g_squared_row_2)
            store_float64(sum_g_squared_row_at, line + 3, 4, sum_g_squared_row_3)
        for line in range(matrix * height + alone, matrix * height + bottom):
            back = (line - matrix) * width
            sum_g_squared_row = 0.0
            for i in range(line * width + left, line * width + right):
                j = i - back
                p = load_float32(p_at, i, 0)
                g = load_float32(g_at, i, 1)
                x0 = g * g
                sum_g_squared_row = accumulate(sum_g_squared_row, x0)
                sum_p_squared = accumulate(sum_p_squared, p * p)
                store_float64(sum_g_squared_col_at, j, 5, accumulate(load_float64(sum_g_squared_col_at, j, 5), x0))
            store_float64(sum_g_squared_row_at, line, 4, sum_g_squared_row)
    store_float64(sum_p_squared_at, chunk, 6, sum_p_squared)


@compiled
def stage_1(pointers, tensors, tensor, row, chunk, place):
    """One chunk: reduces to sum_u_squared per tensor. Buffers do not overlap."""
    first, last = word(place, 1), word(place, 2)
    height, width = word(place, 3), word(place, 4)
    top, bottom = word(place, 5), word(place, 6)
    left, right = word(place, 7), word(place, 8)
    g_at = word(pointers, tensors + tensor)
    a_at = word(pointers, 2 * tensors + tensor)
    b_at = word(pointers, 3 * tensors + tensor)
    sum_u_squared_at = word(pointers, 7 * tensors + tensor)
    one_over_eps1 = float32(number(row, 8))
    sum_u_squared = 0.0
    for matrix in range(first, last):
        alone = bottom - (bottom - top) % 4 if right - left > 2048 else top
        for line in range(matrix * height + top, matrix * height + alone, 4):
            back_0 = (line + 0 - matrix) * width
            back_1 = (line + 1 - matrix) * width
            back_2 = (line + 2 - matrix) * width
            back_3 = (line + 3 - matrix) * width
            a_0 = load_float32(a_at, line + 0, 2)
            a_1 = load_float32(a_at, line + 1, 2)
            a_2 = load_float32(a_at, line + 2, 2)
            a_3 = load_float32(a_at, line + 3, 2)
            for j in range(matrix * width + left, matrix * width + right):
                b = load_float32(b_at, j, 3)
                i = j + back_0
                g = load_float32(g_at, i, 1)
                new_0 = element_1(g, a_0, b, one_over_eps1)
                sum_u_squared = accumulate(sum_u_squared, new_0[0])
                i = j + back_1
                g = load_float32(g_at, i, 1)
                new_1 = element_1(g, a_1, b, one_over_eps1)
                sum_u_squared = accumulate(sum_u_squared, new_1[0])
                i = j + back_2
                g = load_float32(g_at, i, 1)
                new_2 = element_1(g, a_2, b, one_over_eps1)
                sum_u_squared = accumulate(sum_u_squared, new_2[0])
                i = j + back_3
                g = load_float32(g_at, i, 1)
                new_3 = element_1(g, a_3, b, one_over_eps1)
                sum_u_squared = accumulate(sum_u_squared, new_3[0])
        for line in range(matrix * height + alone, matrix * height + bottom):
            back = (line - matrix) * width
            a = load_float32(a_at, line, 2)
            for i in range(line * width + left, line * width + right):
                j = i - back
                g = load_float32(g_at, i, 1)
                b = load_float32(b_at, j, 3)
                u = g * minimum(a * b, one_over_eps1)
                sum_u_squared = accumulate(sum_u_squared, u * u)
    store_float64(sum_u_squared_at, chunk, 7, sum_u_squared)


@compiled
def stage_2(pointers, tensors, tensor, row, chunk, place):
    """One chunk: stores p. Buffers do not overlap."""
    first, last = word(place, 1), word(place, 2)
    height, width = word(place, 3), word(place, 4)
    top, bottom = word(place, 5), word(place, 6)
    left, right = word(place, 7), word(place, 8)
    p_at = word(pointers, tensor)
    g_at = word(pointers, tensors + tensor)
    a_at = word(pointers, 2 * tensors + tensor)
    b_at = word(pointers, 3 * tensors + tensor)
    lr_weight_decay = float32(number(row, 3))
    one_over_eps1 = float32(number(row, 8))
    p_new_factor = float32(number(row, 10))
    for matrix in range(first, last):
        for line in range(matrix * height + top, matrix * height + bottom):
            back = (line - matrix) * width
            a = load_float32(a_at, line, 2)
            for i in range(line * width + left, line * width + right):
                j = i - back
                p = load_float32(p_at, i, 0)
                g = load_float32(g_at, i, 1)
                b = load_float32(b_at, j, 3)
                p_new = p - lr_weight_decay * p
                u = g * minimum(a * b, one_over_eps1)
                p_new_ = p_new - p_new_factor * u
                store_float32(p_at, i, 0, p_new_)


@compiled
def kernel(job):
    """Takes spans of chunks from the job until none is left; any number of threads may run it on one job."""
    fetch_add(job + 64, 1)
    spans, chunks = word(job, 17), word(job, 18)
    tensors, row_index, rows = word(job, 20), word(job, 21), word(job, 22)
    stage, pointers = word(job, 23), word(job, 19)
    while True:
        span = fetch_add(job + 0, 1)
        if span >= word(job, 16):
            break
        for chunk in range(word(spans, 2 * span), word(spans, 2 * span + 1)):
            place = chunks + chunk * 88
            tensor = word(place, 0)
            row = rows + word(row_index, tensor) * 88
            if stage == 0:
                stage_0(pointers, tensors, tensor, row, chunk, place)
            if stage == 1:
                stage_1(pointers, tensors, tensor, row, chunk, place)
            if stage == 2:
                stage_2(pointers, tensors, tensor, row, chunk, place)
    fetch_add(job + 64, -1)
