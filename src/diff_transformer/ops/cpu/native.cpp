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
#include <stdexcept>

#if defined(__AMX_BF16__) && defined(__linux__)
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

template <typename Form>
struct Plan {
    int64_t packed, work, totals;  // bytes of one of each
    int64_t copies, sums, threads;  // how many of the first, of the last and of the second
    bool own;
    char* start;

    Plan(const Problem& p, bool backward, char* workspace = nullptr) : threads(p.threads), start(workspace) {
        Workspace a(nullptr), b(nullptr), c(nullptr);
        Packed::make<Form>(p, a, backward);
        if (backward)
            Backward<Form>(p, b), KeyGradients(p, c);
        else
            Forward<Form>(p, b);
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

template <typename Form>
void forward(const Problem& p, char* start) {
    const Plan<Form> plan(p, false, start);
    const int64_t heads = p.B * p.G, blocks = blocks_of(p);
#pragma omp parallel num_threads(p.threads)
    {
        const int64_t thread = omp_get_thread_num();
        [[maybe_unused]] const Session<Form> session;
        Workspace workspace(plan.work_at(thread));
        Forward<Form> work(p, workspace);
        if (plan.own) {
            Workspace own(plan.packed_at(thread));
            const Packed keys = Packed::make<Form>(p, own, false);
#pragma omp for schedule(dynamic, 1)
            for (int64_t head = 0; head < heads; head++) {
                keys.fill<Form>(p, head / p.G, head % p.G);
                for (int64_t block = 0; block < blocks; block++) work.block(keys, head / p.G, head % p.G, block);
            }
        } else {
#pragma omp for schedule(dynamic, 1)
            for (int64_t head = 0; head < heads; head++) {
                Workspace one(plan.packed_at(head));
                Packed::make<Form>(p, one, false).template fill<Form>(p, head / p.G, head % p.G);
            }
#pragma omp for schedule(dynamic, 1)
            for (int64_t item = 0; item < heads * blocks; item++) {  // the longest first
                const int64_t head = item % heads, block = blocks - 1 - item / heads;
                Workspace one(plan.packed_at(head));
                work.block(Packed::make<Form>(p, one, false), head / p.G, head % p.G, block);
            }
        }
    }
}

template <typename Form>
void backward(const Problem& p, char* start) {
    const Plan<Form> plan(p, true, start);
    const int64_t heads = p.B * p.G, blocks = blocks_of(p);
#pragma omp parallel num_threads(p.threads)
    {
        const int64_t thread = omp_get_thread_num();
        [[maybe_unused]] const Session<Form> session;
        Workspace workspace(plan.work_at(thread));
        Backward<Form> work(p, workspace);
        if (plan.own) {
            Workspace own(plan.packed_at(thread)), sums(plan.totals_at(thread));
            const Packed keys = Packed::make<Form>(p, own, true);
            const KeyGradients totals(p, sums);
#pragma omp for schedule(dynamic, 1)
            for (int64_t head = 0; head < heads; head++) {
                const int64_t b = head / p.G, g = head % p.G;
                keys.fill<Form>(p, b, g);
                totals.clear(p);
                for (int64_t block = 0; block < blocks; block++) work.block(keys, totals, b, g, block);
                write_key_gradients<Form>(p, b, g, &totals, 1);
            }
        } else {
#pragma omp for schedule(dynamic, 1)
            for (int64_t head = 0; head < heads; head++) {
                Workspace one(plan.packed_at(head));
                Packed::make<Form>(p, one, true).template fill<Form>(p, head / p.G, head % p.G);
            }
#pragma omp for schedule(dynamic, 1)
            for (int64_t item = 0; item < heads * p.parts; item++) {
                const int64_t head = item / p.parts;
                Workspace one(plan.packed_at(head)), sums(plan.totals_at(item));
                const Packed keys = Packed::make<Form>(p, one, true);
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
                write_key_gradients<Form>(p, head / p.G, head % p.G, parts, p.parts);
            }
        }
    }
}

// work(Form()) for the form of this number; see diff_attention_forms.
template <typename Work>
auto with_form(int form, Work work) {
    if constexpr (HAS_TILES)
        if (form == 3) return work(InTiles());
    if constexpr (HAS_BF16_PRODUCTS)
        if (form == 2) return work(Pairs());
    if (form == 1) return work(Widened());
    if (form) throw std::invalid_argument("form");
    return work(Fp32());
}

// No exception may leave the library: 0 is success, 1 is no memory, 2 is anything else.
template <typename Function>
int status_of(Function function) {
    try {
        function();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    } catch (...) {
        return 2;
    }
}

}  // namespace

extern "C" {
// The forms that multiply bf16 here, a sum of 2^form: 1 widened to fp32, 2 in pairs, 3 in tiles. Form 0 is for fp32.
int diff_attention_forms() {
    int forms = 1 << 1 | HAS_BF16_PRODUCTS << 2;
#if defined(__AMX_BF16__)
#if defined(__linux__)
    constexpr long request = 0x1023, tile_data = 18;  // Linux grants tiles on request
    const bool granted = syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
    const bool granted = true;
#endif
    forms |= (HAS_TILES && granted) << 3;
#endif
    return forms;
}

// Bytes of workspace that a call needs, or -1 for an unknown form.
int64_t diff_attention_decode_workspace(const Problem* p, int form) {
    return p->threads * (form ? decode_bytes<Widened>(*p) : decode_bytes<Fp32>(*p));
}
int64_t diff_attention_forward_workspace(const Problem* p, int form) {
    int64_t bytes = -1;
    status_of([&] { bytes = with_form(form, [&](auto f) { return Plan<decltype(f)>(*p, false).bytes(); }); });
    return bytes;
}
int64_t diff_attention_backward_workspace(const Problem* p, int form) {
    int64_t bytes = -1;
    status_of([&] { bytes = with_form(form, [&](auto f) { return Plan<decltype(f)>(*p, true).bytes(); }); });
    return bytes;
}

int diff_attention_decode(const Problem* p, int form, char* workspace) {
    return status_of([&] { form ? decode<Widened>(*p, workspace) : decode<Fp32>(*p, workspace); });
}
// Decoding of a whole layer between projections: lambda, attention, head norm and gain.
int diff_attention_decode_layer(const Problem* problem, const Lambda* lambda, int form) {
    float first = 0, second = 0;
    for (int64_t i = 0; i < lambda->n; i++)
        first += lambda->q1[i] * lambda->k1[i], second += lambda->q2[i] * lambda->k2[i];
    float lam = std::exp(first) - std::exp(second) + lambda->initial;
    Problem p = *problem;
    if (lambda->n >= 0) p.lam = &lam, p.lam_by_batch = p.lam_by_head = p.lam_by_row = 0;
    const int64_t bytes = diff_attention_decode_workspace(&p, form);
    char* workspace = static_cast<char*>(std::aligned_alloc(64, up(bytes, 64)));
    if (!workspace) return 1;
    const int status = diff_attention_decode(&p, form, workspace);
    std::free(workspace);
    return status;
}
int diff_attention_forward(const Problem* p, int form, char* workspace) {
    return status_of([&] { with_form(form, [&](auto f) { forward<decltype(f)>(*p, workspace); }); });
}
int diff_attention_backward(const Problem* p, int form, char* workspace) {
    return status_of([&] { with_form(form, [&](auto f) { backward<decltype(f)>(*p, workspace); }); });
}
}
