// Blocks of fibres. A block that goes wrong is given up, with a message:
//
//   * its threads wait for each other at different places of the source, or some for others that never come;
//   * it wrote past its shared memory, or touched memory of nobody.
//
// Shared memory is NaN when a block starts. The order of blocks and threads is drawn anew for every launch.

#include "shim.hpp"
#undef int64_t
#undef uint64_t

#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <vector>

namespace shim {

__thread Thread *current;
__thread dim3 block_size;
__thread dim3 grid_size;

namespace {

const size_t STACK = 256 << 10;
const size_t RED_ZONE = 64;
const unsigned WARP = 32;

enum class State { Ready, AtBarrier, AtExchange, Returned };

struct Fibre {
    Thread thread;
    State state;
    int place;
    uint64_t value;
    unsigned lane;
    ucontext_t start;
    jmp_buf context;
    bool started;
    char *stack;
};

struct Block {
    std::vector<Fibre> fibres;
    std::vector<unsigned> ready;
    std::mt19937_64 random;
    void (*call)(void **);
    void **arguments;
    unsigned running;
    unsigned alive;
    unsigned waiting; // at the barrier
    ucontext_t scheduler_start;
    jmp_buf scheduler;
    std::string error;
};

__thread Block *block;
__thread sigjmp_buf *fault;
struct sigaction before;

void fail(const char *message) {
    if (block->error.empty()) {
        block->error = message;
    }
}

// Back to the scheduler until somebody makes the fibre ready.
void wait() {
    Fibre &fibre = block->fibres[block->running];
    if (_setjmp(fibre.context) == 0) {
        _longjmp(block->scheduler, 1);
    }
}

void enter() {
    block->call(block->arguments);
    block->fibres[block->running].state = State::Returned;
    _longjmp(block->scheduler, 1);
}

void make_ready(unsigned index) {
    block->fibres[index].state = State::Ready;
    block->ready.push_back(index);
}

// Whether the threads of a warp that have not returned all wait for an exchange; then it takes place.
void try_exchange(unsigned warp) {
    unsigned first = warp * WARP;
    unsigned last = std::min<unsigned>(first + WARP, block->fibres.size());
    int place = -1;
    for (unsigned i = first; i < last; i++) {
        Fibre &fibre = block->fibres[i];
        if (fibre.state == State::Returned) {
            continue;
        }
        if (fibre.state != State::AtExchange) {
            return;
        }
        if (place >= 0 && fibre.place != place) {
            return fail("threads of a warp shuffle at different places");
        }
        place = fibre.place;
    }
    uint64_t brought[WARP];
    for (unsigned i = 0; i < WARP; i++) {
        bool there = first + i < last && block->fibres[first + i].state == State::AtExchange;
        brought[i] = there ? block->fibres[first + i].value : ~uint64_t(0);
    }
    for (unsigned i = first; i < last; i++) {
        Fibre &fibre = block->fibres[i];
        if (fibre.state == State::AtExchange) {
            fibre.value = fibre.lane < WARP ? brought[fibre.lane] : ~uint64_t(0);
            make_ready(i);
        }
    }
}

void try_barrier() {
    if (block->waiting == 0 || block->waiting < block->alive) {
        return;
    }
    int place = -1;
    for (Fibre &fibre : block->fibres) {
        if (fibre.state == State::AtBarrier) {
            if (place >= 0 && fibre.place != place) {
                return fail("threads of a block wait at different barriers");
            }
            place = fibre.place;
        }
    }
    block->waiting = 0;
    for (unsigned i = 0; i < block->fibres.size(); i++) {
        if (block->fibres[i].state == State::AtBarrier) {
            make_ready(i);
        }
    }
}

void run_block() {
    while (block->error.empty() && !block->ready.empty()) {
        size_t pick = block->random() % block->ready.size();
        std::swap(block->ready[pick], block->ready.back());
        block->running = block->ready.back();
        block->ready.pop_back();
        Fibre &fibre = block->fibres[block->running];
        current = &fibre.thread;
        if (_setjmp(block->scheduler) == 0) {
            if (fibre.started) {
                _longjmp(fibre.context, 1);
            }
            fibre.started = true;
            setcontext(&fibre.start);
        }
        if (fibre.state == State::Returned) {
            block->alive--;
            unsigned warp = block->running / WARP;
            bool exchanging = false;
            for (unsigned i = warp * WARP; i < std::min<unsigned>((warp + 1) * WARP, block->fibres.size()); i++) {
                exchanging |= block->fibres[i].state == State::AtExchange;
            }
            if (exchanging) {
                try_exchange(warp);
            }
            try_barrier();
        }
    }
    if (block->alive > 0) {
        fail("threads wait for others that never come");
    }
}

void on_fault(int signal, siginfo_t *, void *) {
    if (fault != nullptr) {
        siglongjmp(*fault, signal);
    }
    sigaction(signal, &before, nullptr); // the access is tried again, and is somebody else's
}

void catch_faults() {
    static bool done = [] {
        struct sigaction action = {};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
        sigaction(SIGSEGV, &action, &before);
        return true;
    }();
    (void)done;
}

} // namespace

void barrier(int place) {
    Fibre &fibre = block->fibres[block->running];
    fibre.state = State::AtBarrier;
    fibre.place = place;
    block->waiting++;
    try_barrier();
    wait();
}

uint64_t exchange(int place, uint64_t value, unsigned lane) {
    Fibre &fibre = block->fibres[block->running];
    fibre.state = State::AtExchange;
    fibre.place = place;
    fibre.value = value;
    fibre.lane = lane;
    try_exchange(block->running / WARP);
    wait();
    return fibre.value;
}

unsigned active() {
    unsigned first = block->running / WARP * WARP;
    unsigned mask = 0;
    for (unsigned i = 0; i < WARP && first + i < block->fibres.size(); i++) {
        mask |= unsigned(block->fibres[first + i].state != State::Returned) << i;
    }
    return mask;
}

} // namespace shim

using namespace shim;

// A buffer whose end is that of a page, with a page of nobody behind it and one before.
extern "C" char *shim_allocate(size_t bytes) {
    size_t page = sysconf(_SC_PAGESIZE);
    size_t whole = (bytes + page - 1) / page * page;
    void *map = mmap(nullptr, whole + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) {
        return nullptr;
    }
    char *start = static_cast<char *>(map) + page;
    if (mprotect(start, whole, PROT_READ | PROT_WRITE) != 0) {
        return nullptr;
    }
    return start + whole - bytes;
}

extern "C" void shim_free(char *buffer, size_t bytes) {
    size_t page = sysconf(_SC_PAGESIZE);
    size_t whole = (bytes + page - 1) / page * page;
    munmap(buffer + bytes - whole - page, whole + 2 * page);
}

// Runs a kernel: null, or what went wrong, until the next run of this thread.
extern "C" const char *shim_run(void (*call)(void **), void **arguments, const unsigned *grid, const unsigned *size,
                                char *shared, size_t shared_bytes, uint64_t seed) {
    static thread_local Block own;
    static thread_local std::vector<char *> stacks;
    catch_faults();
    block = &own;
    block->error.clear();
    block->call = call;
    block->arguments = arguments;
    block->random.seed(seed);
    grid_size = dim3(grid[0], grid[1], grid[2]);
    block_size = dim3(size[0], size[1], size[2]);
    unsigned threads = size[0] * size[1] * size[2];
    while (stacks.size() < threads) {
        char *stack = shim_allocate(STACK);
        if (stack == nullptr) {
            return "no memory for a stack";
        }
        stacks.push_back(stack);
    }
    std::vector<unsigned> blocks(size_t(grid[0]) * grid[1] * grid[2]);
    for (unsigned i = 0; i < blocks.size(); i++) {
        blocks[i] = i;
    }
    std::shuffle(blocks.begin(), blocks.end(), block->random);

    sigjmp_buf here;
    if (sigsetjmp(here, 1) != 0) {
        fault = nullptr;
        fail("touched memory of nobody");
        return block->error.c_str();
    }
    fault = &here;
    for (unsigned index : blocks) {
        uint3 position = {index % grid[0], index / grid[0] % grid[1], index / grid[0] / grid[1]};
        block->fibres.assign(threads, Fibre());
        block->ready.clear();
        block->alive = threads;
        block->waiting = 0;
        for (unsigned i = 0; i < threads; i++) {
            Fibre &fibre = block->fibres[i];
            fibre.thread = {{i % size[0], i / size[0] % size[1], i / size[0] / size[1]}, position};
            getcontext(&fibre.start);
            fibre.start.uc_stack.ss_sp = stacks[i];
            fibre.start.uc_stack.ss_size = STACK;
            fibre.start.uc_link = nullptr;
            makecontext(&fibre.start, enter, 0);
            make_ready(i);
        }
        if (shared != nullptr) {
            std::memset(shared, 0xff, shared_bytes + RED_ZONE);
        }
        run_block();
        for (size_t i = 0; i < RED_ZONE && shared != nullptr; i++) {
            if (shared[shared_bytes + i] != char(0xff)) {
                fail("wrote past its shared memory");
            }
        }
        if (!block->error.empty()) {
            break;
        }
    }
    fault = nullptr;
    return block->error.empty() ? nullptr : block->error.c_str();
}
