// Forward and backward in blocks of queries and chunks of keys, so that what a step works on stays in cache.
//
// Forward: the exponentials of a chunk are relative to the running row maximum and are kept until the row sum is known; then
// the maps are subtracted in fp32, and one product with v follows. Backward: a first pass over the keys computes the row
// statistics (maximum, sum, and rowsum of dP times each map), a second one the gradients. Between the two passes
// exponentials and dP are kept, except in tiles: products are so cheap there that the second pass computes them again.

#pragma once

#include "problem.h"

#include <type_traits>

namespace {

struct Chunk {
    int64_t first, n;  // keys, multiples of NR
};

// The keys of a chunk that some of the queries t0 to t1 - 1 may see.
inline Chunk seen(const Problem& p, int64_t t0, int64_t t1, Chunk chunk) {
    const int64_t shift = p.S - p.T, end = chunk.first + chunk.n;
    const int64_t last = t0 >= t1 ? 0 : p.causal ? std::min(end, up(std::max<int64_t>(0, t1 + shift), NR)) : end;
    const int64_t window = p.causal && p.window ? std::max<int64_t>(0, t0 + shift - p.window + 1) / NR * NR : 0;
    const int64_t first = std::max(chunk.first, window);
    return {first, std::max<int64_t>(0, last - first)};
}

// Online softmax of the rows of a block, chunk by chunk.
struct Running {
    float *top, *sum;

    Running(Workspace& workspace, int64_t rows) : top(workspace.floats(rows)), sum(workspace.floats(rows)) {}
    void clear(int64_t rows) { std::fill(top, top + rows, LOWEST), std::fill(sum, sum + rows, 0.0f); }

    // Updates a row's maximum; returns the factor that rescales earlier sums.
    float rise(int64_t i, float to, float factor) {
        if (!(to > top[i])) return 1;
        const float by = top[i] == LOWEST ? 0.0f : std::exp2((top[i] - to) * factor);
        top[i] = to, sum[i] *= by;
        return by;
    }
    // Largest of n scores, or LOWEST if all are masked; in that case a NaN among them makes the sum NaN.
    float look(int64_t i, const float* s, int64_t n) {
        const float found = largest(s, n);
        if (found == LOWEST && any_nan(s, n)) sum[i] = NAN;
        return found;
    }
    // Factors to the map from exponentials of rows `first` on that are relative to `of`. Works on whole vectors.
    void shares(int64_t first, int64_t rows, const float* of, float factor, float* to) const {
        for (int64_t i = first; i < first + rows; i += W) {
            const vf total = load(sum + i), zero = broadcast(0.0f), least = broadcast(-200.0f);
            const vf below = (load(of + i) - load(top + i)) * broadcast(factor);
            const vf inverse = total > zero ? broadcast(1.0f) / total : total - total;  // as of one number
            store(to + i, inverse * exp2(below > least ? below : least));
        }
    }
};

// Exponentials of the forward pass, at most 1, are kept as floats, or those of bf16 scores in half precision.
#ifdef __AVX512F__
template <typename Form>
using Kept = std::conditional_t<std::is_same_v<typename Form::Number, bf16>, uint16_t, float>;
inline void store(uint16_t* p, vf x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}
inline vf load(const uint16_t* p) {
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
#else
template <typename Form>
using Kept = float;
#endif

template <typename Form>
struct Block {
    const Problem& p;
    int64_t padded;  // rows of the largest block
    float factor;    // from scores to exponents of 2

    explicit Block(const Problem& problem)
        : p(problem), padded(padded_rows<Form>(p.rows)), factor(p.scale * 1.44269504f) {}

    Range r;
    int64_t count, here;  // queries of the block, and padded
    void start(int64_t index) { r = range_of(p, index), count = r.t1 - r.t0, here = padded_rows<Form>(count); }
    Chunk seen_by(int64_t first, Chunk chunk) const {
        return seen(p, r.t0 + first, std::min(r.t0 + first + STRIP, r.t1), chunk);
    }
    // work(first, rows, keys) for each strip of queries that sees keys of the chunk.
    template <typename Work>
    void for_strips(Chunk chunk, Work work) const {
        for (int64_t first = 0; first < count; first += STRIP) {
            const Chunk keys = seen_by(first, chunk);
            if (keys.n) work(first, std::min(STRIP, here - first), keys);
        }
    }
    template <typename Work>
    void for_chunks(int64_t size, Work work) const {
        for (int64_t at = 0; at < r.n; at += size) work(at / size, Chunk{r.k0 + at, std::min(size, r.n - at)});
    }
    bool hides(int64_t b, int64_t h, int64_t i, Chunk keys, float* line) const {
        const int64_t t = r.t0 + i;
        return t >= r.t1 || !mask_scores(p, keys.first, keys.n, b, h, t, line);
    }
    static int64_t key_words(int64_t n) { return Form::pairs ? n / 2 : n; }
};

template <typename Form>
struct Forward : Block<Form> {
    using Base = Block<Form>;
    using Base::p, Base::padded, Base::factor, Base::r, Base::count;
    static constexpr int64_t CHUNK = Form::chunk;      // keys at a time
    static constexpr int64_t LINE = CHUNK + HALF;  // numbers from one row of a chunk to the next; not a power of two
    int64_t Dw, wide, chunks;
    uint32_t* q;
    Kept<Form> *e1, *e2;  // exponentials of the block, [chunks][padded][LINE]
    float *top1, *top2;   // that those of a chunk are relative to, [chunks][padded]
    float *share1, *share2;
    Running row1, row2;
    float *s, *total;     // of a strip and a chunk; of the block

    Forward(const Problem& problem, Workspace& workspace)
        : Base(problem), Dw(words<Form>(p.D)), wide(columns(p.Dv)), chunks(longest(p) / CHUNK + 1),
          row1(workspace, padded + W), row2(workspace, padded + W) {
        q = workspace.words(padded * Dw);
        for (auto e : {&e1, &e2}) *e = reinterpret_cast<Kept<Form>*>(workspace.take(sizeof(**e) * padded * chunks * LINE));
        top1 = workspace.floats(padded * chunks + W), top2 = workspace.floats(padded * chunks + W);
        share1 = workspace.floats(padded + W), share2 = workspace.floats(padded + W);
        s = workspace.floats(STRIP * LINE), total = workspace.floats(padded * wide);
    }

    void block(const Packed& keys, int64_t b, int64_t g, int64_t index) {
        Base::start(index);
        const int64_t noise = p.Hn / p.G, m = p.H / p.Hn;
        for (int64_t h2 = g * noise; h2 < (g + 1) * noise; h2++) {
            map(p.q2, keys.k2t, b, h2, e2, top2, row2);
            for (int64_t h = h2 * m; h < (h2 + 1) * m; h++) {
                map(p.q1, keys.k1t, b, h, e1, top1, row1);
                combine(keys, b, h);
                for (int64_t i = 0; i < count; i++) write(b, h, i);
            }
        }
    }

    // Exponentials of a map, relative to the running row maximum, and their sums.
    void map(const Matrix& queries, const uint32_t* kt, int64_t b, int64_t h, Kept<Form>* e, float* top, Running& row) {
        pack_rows<Form>(at<Form>(queries, b, h, r.t0), queries.by_row, count, p.D, q);
        row.clear(padded);
        Base::for_chunks(CHUNK, [&](int64_t c, Chunk chunk) {
            Base::for_strips(chunk, [&](int64_t first, int64_t rows, Chunk keys) {
                Kept<Form>* to = e + (c * padded + first) * LINE + keys.first - chunk.first;
                float* scores = s;
                if constexpr (std::is_same_v<Kept<Form>, float>) scores = to;
                product<Form>(rows, keys.n, Dw, q + first * Dw, Dw, kt + keys.first * Dw, Dw, 0, scores, LINE, false);
                for (int64_t i = 0; i < rows; i++)
                    top[c * padded + first + i] = weigh(b, h, first + i, keys, scores + i * LINE, row, to + i * LINE);
            });
        });
    }

    float weigh(int64_t b, int64_t h, int64_t i, Chunk keys, float* from, Running& row, Kept<Form>* to) {
        const float top = Base::hides(b, h, i, keys, from) ? LOWEST : row.look(i, from, keys.n);
        if (top == LOWEST) {
            std::fill(to, to + keys.n, Kept<Form>(0));
            return LOWEST;
        }
        row.rise(i, top, factor);
        const vf scaled = broadcast(factor), offset = broadcast(-row.top[i] * factor);
        vf sums[2] = {broadcast(0.0f), broadcast(0.0f)};
        for (int64_t k = 0; k < keys.n; k += 2 * W)
            for (int j = 0; j < 2; j++) {
                const vf e = exp2(load(from + k + j * W) * scaled + offset);
                sums[j] += e;
                store(to + k + j * W, e);
            }
        row.sum[i] += sum(sums[0] + sums[1]);
        return row.top[i];
    }

    // (P1 - lam P2) v
    void combine(const Packed& packed, int64_t b, int64_t h) {
        const int64_t Kb = words<Form>(padded_keys(p));
        std::fill(total, total + padded * wide, 0.0f);
        Base::for_chunks(CHUNK, [&](int64_t c, Chunk chunk) {
            Base::for_strips(chunk, [&](int64_t first, int64_t rows, Chunk keys) {
                row1.shares(first, rows, top1 + c * padded, factor, share1);
                row2.shares(first, rows, top2 + c * padded, factor, share2);
                for (int64_t i = 0; i < rows; i++) {
                    const int64_t at = first + i, t = std::min(r.t0 + at, p.T - 1), key = (c * padded + at) * LINE + keys.first - chunk.first;
                    const float lam = p.lam[b * p.lam_by_batch + h * p.lam_by_head + t * p.lam_by_row];
                    const vf c1 = broadcast(share1[at]), c2 = broadcast(share2[at]), minus_lam = broadcast(-lam);
                    for (int64_t k = 0; k < keys.n; k += W) {
                        if (!Form::tiles)
                            __builtin_prefetch(e1 + key + k + 2 * LINE), __builtin_prefetch(e2 + key + k + 2 * LINE);
                        const vf p1 = load(e1 + key + k) * c1, p2 = load(e2 + key + k) * c2;
                        put_words<Form::pairs>(reinterpret_cast<uint32_t*>(s + i * LINE), k,
                                               multiplied_and_added(minus_lam, p2, p1));
                    }
                }
                product<Form>(rows, p.Dv, Base::key_words(keys.n), reinterpret_cast<uint32_t*>(s), LINE, packed.v, Kb,
                              Base::key_words(keys.first), total + first * wide, wide, true);
            });
        });
    }

    void write(int64_t b, int64_t h, int64_t i) {
        auto* to = place<Form>(p.out, b, h, r.t0 + i);
        for (int64_t j = 0; j < p.Dv; j++) put(to + j, total[i * wide + j]);
    }
};

template <typename Form>
struct Backward : Block<Form> {
    using Base = Block<Form>;
    using Base::p, Base::padded, Base::factor, Base::r, Base::count, Base::here;
    static constexpr bool pairs = Form::pairs, keeps = !Form::tiles;
    static constexpr int64_t CHUNK = 256, LINE = CHUNK + HALF;  // as above
    int64_t m, Dw, Dvw, Rw, wide, chunks;  // Rw: words of a contraction over the block's queries; wide: columns of dq
    uint32_t *q, *q_outer;                       // of each map: first a noise head's, then those of its m signal heads
    uint32_t *dout, *dout_outer;                 // of each signal head
    uint32_t *difference, *turned1, *turned2;    // of the block and a chunk: P1 - lam P2, dS1, dS2, [words of rows][keys]
    float *s, *dp;                               // of a strip and a chunk
    float *p2, *dp2;                             // of the block and a chunk
    float *e, *kept_dp;                          // kept: exponentials of each map, dP of each signal head, [padded][line]
    float *tops, *shares;                        // that those of a chunk are relative to, of each map, [padded][chunks];
    float* dq;                                   // of each map
    Running rows;                                // of each map
    float *along1, *along2;                      // of each signal head: sums of e1 dP and of e2 dP, then of P1 dP and P2 dP
    float* delta2;

    Backward(const Problem& problem, Workspace& workspace)
        : Base(problem), m(p.H / p.Hn), Dw(words<Form>(p.D)), Dvw(words<Form>(p.Dv)), Rw(words<Form>(padded)),
          wide(columns(p.D)), chunks(longest(p) / CHUNK + 1), rows(workspace, (m + 1) * padded + W) {
        q = workspace.words((m + 1) * padded * Dw), q_outer = workspace.words((m + 1) * wide * Rw);
        dout = workspace.words(m * padded * Dvw), dout_outer = workspace.words(m * columns(p.Dv) * Rw);
        difference = workspace.words(Rw * LINE), turned1 = workspace.words(Rw * LINE), turned2 = workspace.words(Rw * LINE);
        s = workspace.floats(STRIP * LINE), dp = workspace.floats(STRIP * LINE);
        p2 = workspace.floats(padded * LINE), dp2 = workspace.floats(m > 1 ? padded * LINE : 0);
        e = workspace.floats(keeps ? (m + 1) * chunks * padded * LINE : 0), kept_dp = workspace.floats(keeps ? m * chunks * padded * LINE : 0);
        tops = workspace.floats(keeps ? (m + 1) * padded * chunks + W : 0);
        shares = workspace.floats((m + 1) * padded + W);
        dq = workspace.floats((m + 1) * padded * wide);
        along1 = workspace.floats(m * padded), along2 = workspace.floats(m * padded), delta2 = workspace.floats(padded);
    }

    int64_t b, h2;  // that are worked on
    float lam(int64_t j, int64_t i) const {
        return p.lam[b * p.lam_by_batch + (h2 * m + j) * p.lam_by_head + (r.t0 + i) * p.lam_by_row];
    }

    void block(const Packed& keys, const KeyGradients& totals, int64_t batch, int64_t g, int64_t index) {
        Base::start(index), b = batch;
        if (r.n == 0) return;  // the gradients of these queries stay 0
        const int64_t noise = p.Hn / p.G;
        for (h2 = g * noise; h2 < (g + 1) * noise; h2++) {
            pack();
            Base::for_chunks(CHUNK, [&](int64_t c, Chunk chunk) { look(keys, c, chunk); });
            sum_up();
            Base::for_chunks(CHUNK, [&](int64_t c, Chunk chunk) { differentiate(keys, totals, c, chunk); });
            write(p.dq2, h2, dq);
            for (int64_t j = 0; j < m; j++) write(p.dq1, h2 * m + j, dq + (j + 1) * padded * wide);
        }
    }

    void pack() {
        for (int64_t map = 0; map <= m; map++) {
            const Matrix& from = map ? p.q1 : p.q2;
            const auto* x = at<Form>(from, b, map ? h2 * m + map - 1 : h2, r.t0);
            pack_rows<Form>(x, from.by_row, count, p.D, q + map * padded * Dw);
            pack_outer<Form>(x, from.by_row, count, p.D, Rw, q_outer + map * wide * Rw);
        }
        for (int64_t j = 0; j < m; j++) {
            const auto* x = at<Form>(p.dout, b, h2 * m + j, r.t0);
            pack_rows<Form>(x, p.dout.by_row, count, p.Dv, dout + j * padded * Dvw);
            pack_outer<Form>(x, p.dout.by_row, count, p.Dv, Rw, dout_outer + j * columns(p.Dv) * Rw);
        }
        rows.clear((m + 1) * padded);
        std::fill(along1, along1 + m * padded, 0.0f), std::fill(along2, along2 + m * padded, 0.0f);
        std::fill(dq, dq + (m + 1) * padded * wide, 0.0f);
    }

    // Rows of scores, of exponentials or of dP.
    struct Lines {
        float* at;
        int64_t ld;
        float* operator[](int64_t i) const { return at + i * ld; }
    };
    // Exponentials of a map, or dP, from row `first` and this key on: where they are kept, or `else_at`.
    Lines kept(float* from, int64_t which, int64_t c, int64_t first, Chunk keys, float* else_at) const {
        if (!keeps) return {else_at, LINE};
        return {from + ((which * chunks + c) * padded + first) * LINE + keys.first - (r.k0 + c * CHUNK), LINE};
    }
    float& top_of(int64_t map, int64_t i, int64_t c) const { return tops[(map * chunks + c) * padded + i]; }

    void scores(const Packed& packed, int64_t map, int64_t first, int64_t n, Chunk keys, Lines to) const {
        const uint32_t* kt = map ? packed.k1t : packed.k2t;
        product<Form>(n, keys.n, Dw, q + (map * padded + first) * Dw, Dw, kt + keys.first * Dw, Dw, 0, to.at, to.ld, false);
    }
    void gradient_of_map(const Packed& packed, int64_t j, int64_t first, int64_t n, Chunk keys, Lines to) const {
        product<Form>(n, keys.n, Dvw, dout + (j * padded + first) * Dvw, Dvw, packed.vt + keys.first * Dvw, Dvw, 0, to.at,
                      to.ld, false);
    }
    bool hides(int64_t map, int64_t i, Chunk keys, float* line) const {
        return Base::hides(b, map ? h2 * m + map - 1 : h2, i, keys, line);
    }

    // The first pass.
    void look(const Packed& packed, int64_t c, Chunk chunk) {
        Base::for_strips(chunk, [&](int64_t first, int64_t n, Chunk keys) {
            const Lines e2 = kept(e, 0, c, first, keys, p2 + first * LINE);
            scores(packed, 0, first, n, keys, e2);
            for (int64_t i = 0; i < n; i++) {
                const int64_t at = first + i;
                float* line = e2[i];
                const float top = hides(0, at, keys, line) ? LOWEST : rows.look(at, line, keys.n);
                if (keeps) top_of(0, at, c) = top == LOWEST ? LOWEST : std::max(top, rows.top[at]);
                if (top == LOWEST) {
                    std::fill(line, line + keys.n, 0.0f);
                    continue;
                }
                const float by = rows.rise(at, top, factor);
                for (int64_t j = 0; j < m; j++) along2[j * padded + at] *= by;
                const vf scaled = broadcast(factor), offset = broadcast(-rows.top[at] * factor);
                vf total = broadcast(0.0f);
                for (int64_t k = 0; k < keys.n; k += W) {
                    const vf x = exp2(load(line + k) * scaled + offset);
                    total += x;
                    store(line + k, x);
                }
                rows.sum[at] += sum(total);
            }
            for (int64_t j = 0; j < m; j++) {
                const Lines e1 = kept(e, j + 1, c, first, keys, s), d = kept(kept_dp, j, c, first, keys, dp);
                scores(packed, j + 1, first, n, keys, e1);
                gradient_of_map(packed, j, first, n, keys, d);
                for (int64_t i = 0; i < n; i++) {
                    const int64_t at = j * padded + first + i, row = padded + at;
                    float* line = e1[i];
                    const float top = hides(j + 1, first + i, keys, line) ? LOWEST : rows.look(row, line, keys.n);
                    if (keeps) top_of(j + 1, first + i, c) = top == LOWEST ? LOWEST : std::max(top, rows.top[row]);
                    if (top == LOWEST) std::fill(line, line + keys.n, LOWEST);
                    else along1[at] *= rows.rise(row, top, factor);
                    const vf scaled = broadcast(factor), offset = broadcast(top == LOWEST ? 0.0f : -rows.top[row] * factor);
                    vf total = broadcast(0.0f), total1 = total, total2 = total;
                    for (int64_t k = 0; k < keys.n; k += W) {
                        const vf y = exp2(load(line + k) * scaled + offset), x = load(d[i] + k);
                        total += y;
                        total1 += y * x;
                        total2 += load(e2[i] + k) * x;
                        if (keeps) store(line + k, y);
                    }
                    rows.sum[row] += sum(total);
                    along1[at] += sum(total1), along2[at] += sum(total2);
                }
            }
        });
    }

    void sum_up() {
        for (int64_t i = 0; i < count; i++) {
            delta2[i] = 0;
            for (int64_t j = 0; j < m; j++) {
                float &first = along1[j * padded + i], &second = along2[j * padded + i];
                first *= inverse(rows.sum[(j + 1) * padded + i]);
                second *= inverse(rows.sum[i]);
                delta2[i] -= lam(j, i) * second;
                p.dlam[(b * p.H + h2 * m + j) * p.T + r.t0 + i] = -second;
            }
        }
    }

    // A map in the second pass: computed again, or what was kept, with each row's factor to the map.
    Lines map_again(const Packed& packed, int64_t map, int64_t first, int64_t n, Chunk keys, int64_t c, float* to) const {
        const Lines lines = kept(e, map, c, first, keys, to);
        if constexpr (!keeps) scores(packed, map, first, n, keys, lines);
        if constexpr (keeps) rows.shares(map * padded + first, n, tops + (map * (chunks - 1) + c) * padded, factor, shares);
        for (int64_t i = 0; !keeps && i < n; i++) {
            const int64_t row = map * padded + first + i;
            if (hides(map, first + i, keys, lines[i])) {
                std::fill(lines[i], lines[i] + keys.n, 0.0f);
                continue;
            }
            const vf scaled = broadcast(factor), share = broadcast(inverse(rows.sum[row]));
            const vf offset = broadcast(rows.top[row] == LOWEST ? 0.0f : -rows.top[row] * factor);
            for (int64_t k = 0; k < keys.n; k += W)
                store(lines[i] + k, exp2(load(lines[i] + k) * scaled + offset) * share);
        }
        return lines;
    }
    vf share_of(int64_t map, int64_t i) const { return broadcast(keeps ? shares[map * padded + i] : 1.0f); }
    static vf load_map(const float* line, vf share) { return keeps ? load(line) * share : load(line); }

    // The second pass.
    void differentiate(const Packed& packed, const KeyGradients& totals, int64_t c, Chunk chunk) {
        find_panels(chunk);
        Base::for_strips(chunk, [&](int64_t first, int64_t n, Chunk keys) {
            map_again(packed, 0, first, n, keys, c, p2 + first * LINE + keys.first - chunk.first);
        });
        for (int64_t j = 0; j < m; j++) {
            Base::for_strips(chunk, [&](int64_t first, int64_t n, Chunk keys) {
                const int64_t at = keys.first - chunk.first;
                const Lines signal = map_again(packed, j + 1, first, n, keys, c, s + at);
                const Lines d = kept(kept_dp, j, c, first, keys, dp + at);
                if constexpr (!keeps) gradient_of_map(packed, j, first, n, keys, d);
                for (int64_t i = 0; i < n; i += 2) two_rows(c, j, first, i, at, keys, signal, d);
                through(packed, j + 1, pairs ? reinterpret_cast<uint32_t*>(s) : turned1 + first * LINE + at, first, n, keys);
            });
            add(totals.dv, p.Dv, dout_outer + j * columns(p.Dv) * Rw, difference, chunk);
            add(totals.dk1, p.D, q_outer + (j + 1) * wide * Rw, turned1, chunk);
        }
        Base::for_strips(chunk, [&](int64_t first, int64_t n, Chunk keys) {
            const int64_t at = keys.first - chunk.first;
            for (int64_t i = first; m > 1 && i < first + n; i += 2) two_rows_of_second(c, i, at, keys);
            const uint32_t* ds = pairs ? reinterpret_cast<uint32_t*>(p2 + first * LINE) : turned2 + first * LINE + at;
            through(packed, 0, ds, first, n, keys);
        });
        add(totals.dk2, p.D, q_outer, turned2, chunk);
    }

    // dQ += dS K
    void through(const Packed& packed, int64_t map, const uint32_t* ds, int64_t first, int64_t n, Chunk keys) const {
        product<Form>(n, p.D, Base::key_words(keys.n), ds, LINE, map ? packed.k1 : packed.k2, words<Form>(padded_keys(p)),
                      Base::key_words(keys.first), dq + (map * padded + first) * wide, wide, true);
    }

    // Words of rows, first and behind the last, that see each panel of NR keys of the chunk.
    int64_t panel_begin[CHUNK / NR], panel_end[CHUNK / NR];
    void find_panels(Chunk chunk) {
        std::fill(panel_begin, panel_begin + CHUNK / NR, 0), std::fill(panel_end, panel_end + CHUNK / NR, 0);
        Base::for_strips(chunk, [&](int64_t first, int64_t n, Chunk keys) {
            const int64_t start = (keys.first - chunk.first) / NR;
            for (int64_t i = start; i < start + keys.n / NR; i++) {
                if (!panel_end[i]) panel_begin[i] = row_words(first);
                panel_end[i] = row_words(first + n);
            }
        });
    }
    static int64_t row_words(int64_t n) { return pairs ? n / 2 : n; }

    // dK or dV += A^T B over the block's queries
    void add(float* to, int64_t n, const uint32_t* outer, const uint32_t* of_rows, Chunk chunk) const {
        for (int64_t i = 0; i < chunk.n / NR; i++) {
            const int64_t from = panel_begin[i], Kw = panel_end[i] - from;
            outer_product<Form>(n, Kw, of_rows + from * LINE + i * NR, LINE, outer, Rw, from,
                                to + (chunk.first + i * NR) * columns(n));
        }
    }

    // P1 - lam P2, dS1, and dS2 (with one signal head) or this head's share of dP2 (with several).
    void two_rows(int64_t c, int64_t j, int64_t first, int64_t i, int64_t at, Chunk keys, Lines signal, Lines d) {
        const int64_t row = first + i, to = row_words(row) * LINE + at;
        vf minus_lam[2], delta[2], second_delta[2], share1[2], share2[2];
        const float* second_map[2];
        for (int l = 0; l < 2; l++) {
            const bool real = r.t0 + row + l < r.t1;
            minus_lam[l] = broadcast(real ? -lam(j, row + l) : 0.0f);
            delta[l] = broadcast(real ? along1[j * padded + row + l] : 0.0f);
            second_delta[l] = broadcast(real ? along2[j * padded + row + l] : 0.0f);
            share1[l] = share_of(j + 1, row + l), share2[l] = share_of(0, row + l);
            second_map[l] = second_line(c, row + l, at, keys);
        }
        for (int64_t k = 0; k < keys.n; k += W) {
            vf w[2], ds[2], second[2];
            for (int l = 0; l < 2; l++) {
                if (keeps) {  // the next two rows
                    __builtin_prefetch(signal[i + l + 2] + k), __builtin_prefetch(d[i + l + 2] + k);
                    __builtin_prefetch(second_map[l] + 2 * LINE + k);
                }
                const vf a = load_map(signal[i + l] + k, share1[l]), x = load(d[i + l] + k);
                const vf c = load_map(second_map[l] + k, share2[l]);
                w[l] = a + minus_lam[l] * c;
                ds[l] = a * (x - delta[l]);
                second[l] = m == 1 ? minus_lam[l] * c * (x - second_delta[l]) : minus_lam[l] * x;
            }
            put_two_rows<pairs>(difference + to + k, LINE, w[0], w[1]);
            put_two_rows<pairs>(turned1 + to + k, LINE, ds[0], ds[1]);
            if (m == 1) put_two_rows<pairs>(turned2 + to + k, LINE, second[0], second[1]);
            for (int l = 0; l < 2; l++) {
                if constexpr (pairs) put_words<true>(reinterpret_cast<uint32_t*>(s + (i + l) * LINE), k, ds[l]);
                if (m == 1) {
                    if constexpr (pairs) put_words<true>(reinterpret_cast<uint32_t*>(p2 + (row + l) * LINE), k, second[l]);
                } else {
                    float* sum = dp2 + (row + l) * LINE + at + k;
                    store(sum, j ? load(sum) + second[l] : second[l]);
                }
            }
        }
    }
    float* second_line(int64_t c, int64_t row, int64_t at, Chunk keys) const {
        return kept(e, 0, c, row, keys, p2 + row * LINE + at).at;
    }

    // dS2 of several signal heads.
    void two_rows_of_second(int64_t c, int64_t row, int64_t at, Chunk keys) {
        vf delta[2], share[2];
        const float* map[2];
        for (int l = 0; l < 2; l++) {
            delta[l] = broadcast(r.t0 + row + l < r.t1 ? delta2[row + l] : 0.0f);
            share[l] = share_of(0, row + l), map[l] = second_line(c, row + l, at, keys);
        }
        for (int64_t k = 0; k < keys.n; k += W) {
            vf ds[2];
            for (int l = 0; l < 2; l++) {
                ds[l] = load_map(map[l] + k, share[l]) * (load(dp2 + (row + l) * LINE + at + k) - delta[l]);
                if constexpr (pairs) put_words<true>(reinterpret_cast<uint32_t*>(p2 + (row + l) * LINE), k, ds[l]);
            }
            put_two_rows<pairs>(turned2 + row_words(row) * LINE + at + k, LINE, ds[0], ds[1]);
        }
    }

    void write(const Matrix& to, int64_t h, const float* from) const {
        for (int64_t i = 0; i < count; i++) {
            auto* line = place<Form>(to, b, h, r.t0 + i);
            for (int64_t j = 0; j < p.D; j++) put(line + j, from[i * wide + j] * p.scale);
        }
    }
};

}  // namespace
