// Differential attention on CPU, forward, backward and decoding, in fp32 or bf16.
//
//   P1 = softmax(q1 k1^T scale), P2 = softmax(q2 k2^T scale), out = (P1 - lam P2) v
//
// This file distributes the work over threads and exports the functions. Reading order: products.h, problem.h, chunks.h,
// decode.h.

#include "chunks.h"
#include "decode.h"

#include <cstdlib>
#include <new>

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

int64_t blocks_of(const Problem& p) { return (p.T + p.rows - 1) / p.rows; }

// With many key/value heads, each thread packs those it works on. With few, they are packed once for all threads.
bool heads_fill_threads(const Problem& p) {
    const int64_t heads = p.B * p.G;
    return p.threads == 1 || heads >= 4 * p.threads || heads % p.threads == 0;
}

template <typename Format>
struct Plan {
    int64_t packed, work, totals;  // bytes of one of each
    int64_t copies, sums, threads;  // how many of the first, of the last and of the second
    bool own;
    char* start;

    Plan(const Problem& p, bool backward, char* workspace = nullptr) : threads(p.threads), start(workspace) {
        Workspace a(nullptr), b(nullptr), c(nullptr);
        Packed::make<Format>(p, a, backward);
        if (backward)
            Backward<Format>(p, b), KeyGradients(p, c);
        else
            Forward<Format>(p, b);
        packed = size(a), work = size(b), totals = size(c);
        own = heads_fill_threads(p);
        copies = own ? p.threads : p.B * p.G;
        sums = own ? p.threads : p.B * p.G * p.parts;
    }
    static int64_t size(const Workspace& workspace) { return reinterpret_cast<intptr_t>(workspace.next); }
    int64_t bytes() const { return packed * copies + work * threads + totals * sums; }
    char* packed_at(int64_t i) const { return start + packed * i; }
    char* work_at(int64_t i) const { return start + packed * copies + work * i; }
    char* totals_at(int64_t i) const { return start + packed * copies + work * threads + totals * i; }
};

template <typename Format>
void forward(const Problem& p, char* start) {
    const Plan<Format> plan(p, false, start);
    const int64_t heads = p.B * p.G, blocks = blocks_of(p);
#pragma omp parallel num_threads(p.threads)
    {
        const int64_t thread = omp_get_thread_num();
        [[maybe_unused]] const Session<Format> session;
        Workspace workspace(plan.work_at(thread));
        Forward<Format> work(p, workspace);
        if (plan.own) {
            Workspace own(plan.packed_at(thread));
            const Packed keys = Packed::make<Format>(p, own, false);
#pragma omp for schedule(dynamic, 1)
            for (int64_t head = 0; head < heads; head++) {
                keys.fill<Format>(p, head / p.G, head % p.G);
                for (int64_t block = 0; block < blocks; block++) work.block(keys, head / p.G, head % p.G, block);
            }
        } else {
#pragma omp for schedule(dynamic, 1)
            for (int64_t head = 0; head < heads; head++) {
                Workspace memory(plan.packed_at(head));
                Packed::make<Format>(p, memory, false).template fill<Format>(p, head / p.G, head % p.G);
            }
#pragma omp for schedule(dynamic, 1)
            for (int64_t item = 0; item < heads * blocks; item++) {  // the longest first
                const int64_t head = item % heads, block = blocks - 1 - item / heads;
                Workspace memory(plan.packed_at(head));
                work.block(Packed::make<Format>(p, memory, false), head / p.G, head % p.G, block);
            }
        }
    }
}

template <typename Format>
void backward(const Problem& p, char* start) {
    const Plan<Format> plan(p, true, start);
    const int64_t heads = p.B * p.G, blocks = blocks_of(p);
#pragma omp parallel num_threads(p.threads)
    {
        const int64_t thread = omp_get_thread_num();
        [[maybe_unused]] const Session<Format> session;
        Workspace workspace(plan.work_at(thread));
        Backward<Format> work(p, workspace);
        if (plan.own) {
            Workspace own(plan.packed_at(thread)), sums(plan.totals_at(thread));
            const Packed keys = Packed::make<Format>(p, own, true);
            const KeyGradients totals(p, sums);
#pragma omp for schedule(dynamic, 1)
            for (int64_t head = 0; head < heads; head++) {
                const int64_t b = head / p.G, g = head % p.G;
                keys.fill<Format>(p, b, g);
                totals.clear(p);
                for (int64_t block = 0; block < blocks; block++) work.block(keys, totals, b, g, block);
                write_key_gradients<Format>(p, b, g, &totals, 1);
            }
        } else {
#pragma omp for schedule(dynamic, 1)
            for (int64_t head = 0; head < heads; head++) {
                Workspace memory(plan.packed_at(head));
                Packed::make<Format>(p, memory, true).template fill<Format>(p, head / p.G, head % p.G);
            }
#pragma omp for schedule(dynamic, 1)
            for (int64_t item = 0; item < heads * p.parts; item++) {
                const int64_t head = item / p.parts;
                Workspace memory(plan.packed_at(head)), sums(plan.totals_at(item));
                const Packed keys = Packed::make<Format>(p, memory, true);
                const KeyGradients totals(p, sums);
                totals.clear(p);
                for (int64_t block = item % p.parts; block < blocks; block += p.parts)
                    work.block(keys, totals, head / p.G, head % p.G, block);
            }
#pragma omp for schedule(dynamic, 1)
            for (int64_t head = 0; head < heads; head++) {
                KeyGradients* parts = static_cast<KeyGradients*>(__builtin_alloca(sizeof(KeyGradients) * p.parts));
                for (int64_t part = 0; part < p.parts; part++) {
                    Workspace sums(plan.totals_at(head * p.parts + part));
                    new (parts + part) KeyGradients(p, sums);
                }
                write_key_gradients<Format>(p, head / p.G, head % p.G, parts, p.parts);
            }
        }
    }
}

// work(Format()) for the number format of the problem.
template <typename Work>
auto with_format(const Problem& p, Work work) {
    return p.bf16 ? work(Bf16()) : work(Fp32());
}

// The work on a workspace of this size. No exception may leave the library: 0 is success, 1 is no memory, 2 anything else.
template <typename Work>
int run(int64_t bytes, Work work) {
    char* workspace = static_cast<char*>(std::aligned_alloc(64, round_up(bytes, 64)));
    if (!workspace) return 1;
    int status = 0;
    try {
        work(workspace);
    } catch (...) {
        status = 2;
    }
    std::free(workspace);
    return status;
}

}  // namespace

extern "C" {
// 1 if this process may run the library: Linux grants the registers of AMX on request.
int diff_attention_start() {
#ifdef __AMX_BF16__
    constexpr long request = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
    return 1;
#endif
}

int diff_attention_forward(const Problem* p) {
    return with_format(*p, [&](auto format) {
        using Format = decltype(format);
        return run(Plan<Format>(*p, false).bytes(), [&](char* workspace) { forward<Format>(*p, workspace); });
    });
}

int diff_attention_backward(const Problem* p) {
    return with_format(*p, [&](auto format) {
        using Format = decltype(format);
        return run(Plan<Format>(*p, true).bytes(), [&](char* workspace) { backward<Format>(*p, workspace); });
    });
}

// bf16 is widened: the products of a few queries wait for memory.
int diff_attention_decode(const Problem* p, const HeadOutput* output) {
    const auto of = [&](auto format) {
        using Format = decltype(format);
        return run(p->threads * decode_bytes<Format>(*p, *output), [&](char* workspace) { decode<Format>(*p, *output, workspace); });
    };
    return p->bf16 ? of(Bf16AsFp32()) : of(Fp32());
}
}
