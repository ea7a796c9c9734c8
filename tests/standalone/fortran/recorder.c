/* Stands between a program and adamw_step (linked with --wrap=adamw_step), and remembers the addresses it was given. */

#include "adamw.h"

static const float *param_given;
static const float *grad_given;

int __real_adamw_step(float *param, const float *grad, void *state, int64_t count, const adamw_hyper *hyper);
int __wrap_adamw_step(float *param, const float *grad, void *state, int64_t count, const adamw_hyper *hyper);
const void *last_param(void);
const void *last_grad(void);

int __wrap_adamw_step(float *param, const float *grad, void *state, int64_t count, const adamw_hyper *hyper)
{
    param_given = param;
    grad_given = grad;
    return __real_adamw_step(param, grad, state, count, hyper);
}

const void *last_param(void)
{
    return param_given;
}

const void *last_grad(void)
{
    return grad_given;
}
