/* Stands between a program and the steps of two rules (linked with --wrap=adamw_step and --wrap=lion_step), and checks
   that they are given the arrays that the program named, in turn, and never a copy. */

#include "adamw.h"
#include "lion.h"

enum { MOST = 64 };
static const void *params[MOST], *grads[MOST];
static int expected, given, wrong;

void expect_step(const void *param, const void *grad);
int wrong_steps(void);

/* Names the arrays of one more step, in the order in which a round of steps takes them. */
void expect_step(const void *param, const void *grad)
{
    if (expected < MOST) {
        params[expected] = param;
        grads[expected] = grad;
        expected++;
    }
}

/* The steps so far with other arrays; -1 where the last round is not complete, or none was taken. */
int wrong_steps(void)
{
    return expected == 0 || given == 0 || given % expected != 0 ? -1 : wrong;
}

static void check(const void *param, const void *grad)
{
    const int turn = expected > 0 ? given % expected : 0;
    wrong += param != params[turn] || grad != grads[turn];
    given++;
}

#define WRAPPED(name) \
    int __real_##name##_step(float *param, const float *grad, void *state, int64_t count, const name##_hyper *hyper); \
    int __wrap_##name##_step(float *param, const float *grad, void *state, int64_t count, const name##_hyper *hyper); \
    int __wrap_##name##_step(float *param, const float *grad, void *state, int64_t count, const name##_hyper *hyper) \
    { \
        check(param, grad); \
        return __real_##name##_step(param, grad, state, count, hyper); \
    }

WRAPPED(adamw)
WRAPPED(lion)
