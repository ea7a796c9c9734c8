// Runs the blocks of a grid one after the other, and the threads of a block as fibers of one thread.
//
// A fiber runs until it waits for the others. A warp goes on as soon as all of its lanes wait for each other, a block
// as soon as all of its warps wait for each other; where they wait for different things, the kernel is wrong and the
// process ends. Threads run in ascending order, or in descending order: what a kernel computes must not depend on it.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <setjmp.h>
#include <ucontext.h>

namespace {

enum State { READY, WARP, BLOCK, DONE };

constexpr unsigned most = 1024, lanes = 32, stack_bytes = 1 << 16, widest = 16;

struct Fiber {
    State state = READY;
    unsigned exchanges = 0;
    bool begun = false;
    jmp_buf here;
    ucontext_t start;
    std::unique_ptr<char[]> stack;
};

Fiber fibers[most];
char exchanged[most / lanes][2][lanes * widest];
unsigned current;
jmp_buf scheduler;
void (*kernel)(void **);
void **arguments;

[[noreturn]] void fail(const char *why)
{
    std::fprintf(stderr, "cuda_on_cpu: %s\n", why);
    std::abort();
}

// Leaves a fiber until it is run again.
void leave(State state)
{
    Fiber &self = fibers[current];
    self.state = state;
    if (!_setjmp(self.here))
        _longjmp(scheduler, 1);
}

void body()
{
    for (;;) {
        kernel(arguments);
        leave(DONE);
    }
}

}  // namespace

extern "C" {

struct cuda_index {
    unsigned x, y, z;
} threadIdx, blockIdx, blockDim, gridDim;

void cuda_sync_threads() { leave(BLOCK); }

const void *cuda_sync_warp(const void *value, unsigned long bytes)
{
    if (bytes > widest)
        fail("a lane gives too much");
    Fiber &self = fibers[current];
    char *room = exchanged[current / lanes][self.exchanges++ % 2];
    std::memcpy(room + bytes * (current % lanes), value, bytes);
    leave(WARP);
    return room;
}

}  // extern "C"

namespace {

void run_fiber(unsigned thread)
{
    Fiber &fiber = fibers[thread];
    current = thread;
    threadIdx = {thread, 0, 0};
    if (_setjmp(scheduler))
        return;
    if (fiber.begun)
        _longjmp(fiber.here, 1);
    fiber.begun = true;
    fiber.stack = std::make_unique<char[]>(stack_bytes);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = stack_bytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, body, 0);
    setcontext(&fiber.start);
}

// Runs the threads from `first` until all wait for the block, or are done.
State run_warp(unsigned first, unsigned count, bool backwards)
{
    for (;;) {
        for (unsigned i = 0; i < count; ++i)
            run_fiber(first + (backwards ? count - 1 - i : i));
        const State state = fibers[first].state;
        for (unsigned i = 0; i < count; ++i)
            if (fibers[first + i].state != state)
                fail("the lanes of a warp wait for different things");
        if (state != WARP)
            return state;
    }
}

void run_block(bool backwards)
{
    const unsigned warps = blockDim.x / lanes;
    for (unsigned i = 0; i < blockDim.x; ++i)
        fibers[i].state = READY;
    for (State state = BLOCK; state == BLOCK;) {
        for (unsigned i = 0; i < warps; ++i) {
            const State found = run_warp((backwards ? warps - 1 - i : i) * lanes, lanes, backwards);
            if (i && found != state)
                fail("the warps of a block wait for different things");
            state = found;
        }
    }
}

}  // namespace

extern "C" void cuda_launch(void (*given)(void **), void **given_arguments, unsigned grid, unsigned block, int backwards)
{
    if (!block || block > most || block % lanes)
        fail("a block must have a multiple of 32 threads, at most 1024");
    kernel = given;
    arguments = given_arguments;
    gridDim = {grid, 1, 1};
    blockDim = {block, 1, 1};
    for (unsigned i = 0; i < grid; ++i) {
        blockIdx = {backwards ? grid - 1 - i : i, 0, 0};
        run_block(backwards);
    }
}
