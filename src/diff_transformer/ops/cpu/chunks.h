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
inline Chunk visible(const Problem& p, int64_t t0, int64_t t1, Chunk chunk) {
    const int64_t shift = p.S - p.T, end = chunk.first + chunk.n;
    const int64_t last = t0 >= t1 ? 0 : p.causal ? std::min(end, round_up(std::max<int64_t>(0, t1 + shift), NR)) : end;
    const int64_t window = p.causal && p.window ? std::max<int64_t>(0, t0 + shift - p.window + 1) / NR * NR : 0;
    const int64_t first = std::max(chunk.first, window);
    return {first, std::max<int64_t>(0, last - first)};
}

// Online softmax of the rows of a block, chunk by chunk.
struct OnlineSoftmax {
    float *max, *sum;

    OnlineSoftmax(Workspace& workspace, int64_t rows) : max(workspace.floats(rows)), sum(workspace.floats(rows)) {}
    void clear(int64_t rows) { std::fill(max, max + rows, LOWEST), std::fill(sum, sum + rows, 0.0f); }

    // Updates a row's maximum; returns the factor that rescales earlier sums.
    float raise_max(int64_t i, float to, float factor) {
        if (!(to > max[i])) return 1;
        const float by = max[i] == LOWEST ? 0.0f : std::exp2((max[i] - to) * factor);
        max[i] = to, sum[i] *= by;
        return by;
    }
    // Largest of n scores, or LOWEST if all are masked; in that case a NaN among them makes the sum NaN.
    float largest_score(int64_t i, const float* s, int64_t n) {
        const float found = largest(s, n);
        if (found == LOWEST && any_nan(s, n)) sum[i] = NAN;
        return found;
    }
    // Factors to the map from exponentials of rows `first` on that are relative to `of`. Works on whole vectors.
    void normalisers(int64_t first, int64_t rows, const float* of, float factor, float* to) const {
        for (int64_t i = first; i < first + rows; i += W) {
            const vf total = load(sum + i), zero = broadcast(0.0f), least = broadcast(-200.0f);
            const vf below = (load(of + i) - load(max + i)) * broadcast(factor);
            const vf inverse = total > zero ? broadcast(1.0f) / total : total - total;  // as of one number
            store(to + i, inverse * exp2(below > least ? below : least));
        }
    }
};

// Exponentials of the forward pass, at most 1, are kept as floats, or those of bf16 scores in half precision.
#ifdef __AVX512F__
template <typename Format>
using Saved = std::conditional_t<std::is_same_v<typename Format::Number, bf16>, uint16_t, float>;
inline void store(uint16_t* p, vf x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}
inline vf load(const uint16_t* p) {
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
#else
template <typename Format>
using Saved = float;
#endif

template <typename Format>
struct Block {
    const Problem& p;
    int64_t padded;  // rows of the largest block
    float factor;    // from scores to exponents of 2

    explicit Block(const Problem& problem)
        : p(problem), padded(padded_rows<Format>(p.rows)), factor(p.scale * 1.44269504f) {}

    Range r;
    int64_t count, here;  // queries of the block, and padded
    void start(int64_t index) { r = range_of(p, index), count = r.t1 - r.t0, here = padded_rows<Format>(count); }
    Chunk visible_by(int64_t first, Chunk chunk) const {
        return visible(p, r.t0 + first, std::min(r.t0 + first + STRIP, r.t1), chunk);
    }
    // work(first, rows, keys) for each strip of queries that sees keys of the chunk.
    template <typename Work>
    void for_strips(Chunk chunk, Work work) const {
        for (int64_t first = 0; first < count; first += STRIP) {
            const Chunk keys = visible_by(first, chunk);
            if (keys.n) work(first, std::min(STRIP, here - first), keys);
        }
    }
    template <typename Work>
    void for_chunks(int64_t size, Work work) const {
        for (int64_t at = 0; at < r.n; at += size) work(at / size, Chunk{r.k0 + at, std::min(size, r.n - at)});
    }
    bool fully_masked(int64_t b, int64_t h, int64_t i, Chunk keys, float* line) const {
        const int64_t t = r.t0 + i;
        return t >= r.t1 || !mask_scores(p, keys.first, keys.n, b, h, t, line);
    }
    static int64_t key_words(int64_t n) { return Format::pairs ? n / 2 : n; }
};

template <typename Format>
struct Forward : Block<Format> {
    using Base = Block<Format>;
    using Base::p, Base::padded, Base::factor, Base::r, Base::count;
    static constexpr int64_t CHUNK = Format::chunk;      // keys at a time
    static constexpr int64_t LINE = CHUNK + HALF;  // numbers from one row of a chunk to the next; not a power of two
    int64_t Dw, wide, chunks;
    uint32_t* q;
    Saved<Format> *e1, *e2;  // exponentials of the block, [chunks][padded][LINE]
    float *max1, *max2;   // that those of a chunk are relative to, [chunks][padded]
    float *normaliser1, *normaliser2;
    OnlineSoftmax row1, row2;
    float *s, *total;     // of a strip and a chunk; of the block

    Forward(const Problem& problem, Workspace& workspace)
        : Base(problem), Dw(words<Format>(p.D)), wide(columns(p.Dv)), chunks(longest(p) / CHUNK + 1),
          row1(workspace, padded + W), row2(workspace, padded + W) {
        q = workspace.words(padded * Dw);
        for (auto e : {&e1, &e2}) *e = reinterpret_cast<Saved<Format>*>(workspace.take(sizeof(**e) * padded * chunks * LINE));
        max1 = workspace.floats(padded * chunks + W), max2 = workspace.floats(padded * chunks + W);
        normaliser1 = workspace.floats(padded + W), normaliser2 = workspace.floats(padded + W);
        s = workspace.floats(STRIP * LINE), total = workspace.floats(padded * wide);
    }

    void block(const Packed& keys, int64_t b, int64_t g, int64_t index) {
        Base::start(index);
        const int64_t noise = p.Hn / p.G, m = p.H / p.Hn;
        for (int64_t h2 = g * noise; h2 < (g + 1) * noise; h2++) {
            map(p.q2, keys.k2t, b, h2, e2, max2, row2);
            for (int64_t h = h2 * m; h < (h2 + 1) * m; h++) {
                map(p.q1, keys.k1t, b, h, e1, max1, row1);
                combine(keys, b, h);
                for (int64_t i = 0; i < count; i++) write(b, h, i);
            }
        }
    }

    // Exponentials of a map, relative to the running row maximum, and their sums.
    void map(const Matrix& queries, const uint32_t* kt, int64_t b, int64_t h, Saved<Format>* e, float* max, OnlineSoftmax& row) {
        pack_rows<Format>(at<Format>(queries, b, h, r.t0), queries.row, count, p.D, q);
        row.clear(padded);
        Base::for_chunks(CHUNK, [&](int64_t c, Chunk chunk) {
            Base::for_strips(chunk, [&](int64_t first, int64_t rows, Chunk keys) {
                Saved<Format>* to = e + (c * padded + first) * LINE + keys.first - chunk.first;
                float* scores = s;
                if constexpr (std::is_same_v<Saved<Format>, float>) scores = to;
                product<Format>(rows, keys.n, Dw, q + first * Dw, Dw, kt + keys.first * Dw, Dw, 0, scores, LINE, false);
                for (int64_t i = 0; i < rows; i++)
                    max[c * padded + first + i] = exponentiate(b, h, first + i, keys, scores + i * LINE, row, to + i * LINE);
            });
        });
    }

    float exponentiate(int64_t b, int64_t h, int64_t i, Chunk keys, float* from, OnlineSoftmax& row, Saved<Format>* to) {
        const float max = Base::fully_masked(b, h, i, keys, from) ? LOWEST : row.largest_score(i, from, keys.n);
        if (max == LOWEST) {
            std::fill(to, to + keys.n, Saved<Format>(0));
            return LOWEST;
        }
        row.raise_max(i, max, factor);
        const vf scaled = broadcast(factor), offset = broadcast(-row.max[i] * factor);
        vf sums[2] = {broadcast(0.0f), broadcast(0.0f)};
        for (int64_t k = 0; k < keys.n; k += 2 * W)
            for (int j = 0; j < 2; j++) {
                const vf e = exp2(load(from + k + j * W) * scaled + offset);
                sums[j] += e;
                store(to + k + j * W, e);
            }
        row.sum[i] += sum(sums[0] + sums[1]);
        return row.max[i];
    }

    // (first P1 - lam P2) v
    void combine(const Packed& packed, int64_t b, int64_t h) {
        const int64_t Kb = words<Format>(padded_keys(p));
        std::fill(total, total + padded * wide, 0.0f);
        Base::for_chunks(CHUNK, [&](int64_t c, Chunk chunk) {
            Base::for_strips(chunk, [&](int64_t first, int64_t rows, Chunk keys) {
                row1.normalisers(first, rows, max1 + c * padded, factor, normaliser1);
                row2.normalisers(first, rows, max2 + c * padded, factor, normaliser2);
                for (int64_t i = 0; i < rows; i++) {
                    const int64_t at = first + i, t = std::min(r.t0 + at, p.T - 1), key = (c * padded + at) * LINE + keys.first - chunk.first;
                    const vf c1 = broadcast(normaliser1[at] * p.first.at(b, h, t, 1)), c2 = broadcast(normaliser2[at]);
                    const vf minus_lam = broadcast(-p.lam.at(b, h, t, 0));
                    for (int64_t k = 0; k < keys.n; k += W) {
                        if (!Format::tiles)
                            __builtin_prefetch(e1 + key + k + 2 * LINE), __builtin_prefetch(e2 + key + k + 2 * LINE);
                        const vf p1 = load(e1 + key + k) * c1, p2 = load(e2 + key + k) * c2;
                        put_words<Format::pairs>(reinterpret_cast<uint32_t*>(s + i * LINE), k,
                                               multiplied_and_added(minus_lam, p2, p1));
                    }
                }
                product<Format>(rows, p.Dv, Base::key_words(keys.n), reinterpret_cast<uint32_t*>(s), LINE, packed.v, Kb,
                              Base::key_words(keys.first), total + first * wide, wide, true);
            });
        });
    }

    void write(int64_t b, int64_t h, int64_t i) {
        auto* to = place<Format>(p.out, b, h, r.t0 + i);
        for (int64_t j = 0; j < p.Dv; j++) put(to + j, total[i * wide + j]);
    }
};

template <typename Format>
struct Backward : Block<Format> {
    using Base = Block<Format>;
    using Base::p, Base::padded, Base::factor, Base::r, Base::count, Base::here;
    static constexpr bool pairs = Format::pairs, saves = !Format::tiles;
    static constexpr int64_t CHUNK = 256, LINE = CHUNK + HALF;  // as above
    int64_t m, Dw, Dvw, Rw, wide, chunks;  // Rw: words of a contraction over the block's queries; wide: columns of dq
    uint32_t *q, *q_outer;                       // of each map: first a noise head's, then those of its m signal heads
    uint32_t *dout, *dout_outer;                 // of each signal head
    uint32_t *difference_t, *ds1_t, *ds2_t;    // of the block and a chunk: first P1 - lam P2, dS1, dS2, [words of rows][keys]
    float *s, *dp;                               // of a strip and a chunk
    float *p2, *dp2;                             // of the block and a chunk
    float *e, *saved_dp;                          // kept: exponentials of each map, dP of each signal head, [padded][line]
    float *maxima, *normalisers;                        // that those of a chunk are relative to, of each map, [padded][chunks];
    float* dq;                                   // of each map
    OnlineSoftmax rows;                                // of each map
    float *rowsum1, *rowsum2;                      // of each signal head: sums of e1 dP and of e2 dP, then of P1 dP and P2 dP
    float* delta2;

    Backward(const Problem& problem, Workspace& workspace)
        : Base(problem), m(p.H / p.Hn), Dw(words<Format>(p.D)), Dvw(words<Format>(p.Dv)), Rw(words<Format>(padded)),
          wide(columns(p.D)), chunks(longest(p) / CHUNK + 1), rows(workspace, (m + 1) * padded + W) {
        q = workspace.words((m + 1) * padded * Dw), q_outer = workspace.words((m + 1) * wide * Rw);
        dout = workspace.words(m * padded * Dvw), dout_outer = workspace.words(m * columns(p.Dv) * Rw);
        difference_t = workspace.words(Rw * LINE), ds1_t = workspace.words(Rw * LINE), ds2_t = workspace.words(Rw * LINE);
        s = workspace.floats(STRIP * LINE), dp = workspace.floats(STRIP * LINE);
        p2 = workspace.floats(padded * LINE), dp2 = workspace.floats(m > 1 ? padded * LINE : 0);
        e = workspace.floats(saves ? (m + 1) * chunks * padded * LINE : 0), saved_dp = workspace.floats(saves ? m * chunks * padded * LINE : 0);
        maxima = workspace.floats(saves ? (m + 1) * padded * chunks + W : 0);
        normalisers = workspace.floats((m + 1) * padded + W);
        dq = workspace.floats((m + 1) * padded * wide);
        rowsum1 = workspace.floats(m * padded), rowsum2 = workspace.floats(m * padded), delta2 = workspace.floats(padded);
    }

    int64_t b, h2;  // that are worked on
    float lam(int64_t j, int64_t i) const {
        return p.lam.at(b, h2 * m + j, r.t0 + i, 0);
    }
    // Weight of a map's row: map 0 is a noise head's, map j + 1 that of its signal head j.
    float weight_of_first(int64_t map, int64_t i) const {
        return map && r.t0 + i < r.t1 ? p.first.at(b, h2 * m + map - 1, r.t0 + i, 1) : 1.0f;
    }

    void block(const Packed& keys, const KeyGradients& totals, int64_t batch, int64_t g, int64_t index) {
        Base::start(index), b = batch;
        if (r.n == 0) return;  // the gradients of these queries stay 0
        const int64_t noise = p.Hn / p.G;
        for (h2 = g * noise; h2 < (g + 1) * noise; h2++) {
            pack();
            Base::for_chunks(CHUNK, [&](int64_t c, Chunk chunk) { accumulate_statistics(keys, c, chunk); });
            finish_statistics();
            Base::for_chunks(CHUNK, [&](int64_t c, Chunk chunk) { differentiate(keys, totals, c, chunk); });
            write(p.dq2, h2, dq);
            for (int64_t j = 0; j < m; j++) write(p.dq1, h2 * m + j, dq + (j + 1) * padded * wide);
        }
    }

    void pack() {
        for (int64_t map = 0; map <= m; map++) {
            const Matrix& from = map ? p.q1 : p.q2;
            const auto* x = at<Format>(from, b, map ? h2 * m + map - 1 : h2, r.t0);
            pack_rows<Format>(x, from.row, count, p.D, q + map * padded * Dw);
            pack_outer<Format>(x, from.row, count, p.D, Rw, q_outer + map * wide * Rw);
        }
        for (int64_t j = 0; j < m; j++) {
            const auto* x = at<Format>(p.dout, b, h2 * m + j, r.t0);
            pack_rows<Format>(x, p.dout.row, count, p.Dv, dout + j * padded * Dvw);
            pack_outer<Format>(x, p.dout.row, count, p.Dv, Rw, dout_outer + j * columns(p.Dv) * Rw);
        }
        rows.clear((m + 1) * padded);
        std::fill(rowsum1, rowsum1 + m * padded, 0.0f), std::fill(rowsum2, rowsum2 + m * padded, 0.0f);
        std::fill(dq, dq + (m + 1) * padded * wide, 0.0f);
    }

    // Rows of scores, of exponentials or of dP.
    struct Lines {
        float* at;
        int64_t ld;
        float* operator[](int64_t i) const { return at + i * ld; }
    };
    // Exponentials of a map, or dP, from row `first` and this key on: where they are kept, or `else_at`.
    Lines lines_of(float* from, int64_t which, int64_t c, int64_t first, Chunk keys, float* else_at) const {
        if (!saves) return {else_at, LINE};
        return {from + ((which * chunks + c) * padded + first) * LINE + keys.first - (r.k0 + c * CHUNK), LINE};
    }
    float& max_of(int64_t map, int64_t i, int64_t c) const { return maxima[(map * chunks + c) * padded + i]; }

    void scores(const Packed& packed, int64_t map, int64_t first, int64_t n, Chunk keys, Lines to) const {
        const uint32_t* kt = map ? packed.k1t : packed.k2t;
        product<Format>(n, keys.n, Dw, q + (map * padded + first) * Dw, Dw, kt + keys.first * Dw, Dw, 0, to.at, to.ld, false);
    }
    void gradient_of_map(const Packed& packed, int64_t j, int64_t first, int64_t n, Chunk keys, Lines to) const {
        product<Format>(n, keys.n, Dvw, dout + (j * padded + first) * Dvw, Dvw, packed.vt + keys.first * Dvw, Dvw, 0, to.at,
                      to.ld, false);
    }
    bool fully_masked(int64_t map, int64_t i, Chunk keys, float* line) const {
        return Base::fully_masked(b, map ? h2 * m + map - 1 : h2, i, keys, line);
    }

    // The first pass.
    void accumulate_statistics(const Packed& packed, int64_t c, Chunk chunk) {
        Base::for_strips(chunk, [&](int64_t first, int64_t n, Chunk keys) {
            const Lines e2 = lines_of(e, 0, c, first, keys, p2 + first * LINE);
            scores(packed, 0, first, n, keys, e2);
            for (int64_t i = 0; i < n; i++) {
                const int64_t at = first + i;
                float* line = e2[i];
                const float max = fully_masked(0, at, keys, line) ? LOWEST : rows.largest_score(at, line, keys.n);
                if (saves) max_of(0, at, c) = max == LOWEST ? LOWEST : std::max(max, rows.max[at]);
                if (max == LOWEST) {
                    std::fill(line, line + keys.n, 0.0f);
                    continue;
                }
                const float by = rows.raise_max(at, max, factor);
                for (int64_t j = 0; j < m; j++) rowsum2[j * padded + at] *= by;
                const vf scaled = broadcast(factor), offset = broadcast(-rows.max[at] * factor);
                vf total = broadcast(0.0f);
                for (int64_t k = 0; k < keys.n; k += W) {
                    const vf x = exp2(load(line + k) * scaled + offset);
                    total += x;
                    store(line + k, x);
                }
                rows.sum[at] += sum(total);
            }
            for (int64_t j = 0; j < m; j++) {
                const Lines e1 = lines_of(e, j + 1, c, first, keys, s), d = lines_of(saved_dp, j, c, first, keys, dp);
                scores(packed, j + 1, first, n, keys, e1);
                gradient_of_map(packed, j, first, n, keys, d);
                for (int64_t i = 0; i < n; i++) {
                    const int64_t at = j * padded + first + i, row = padded + at;
                    float* line = e1[i];
                    const float max = fully_masked(j + 1, first + i, keys, line) ? LOWEST : rows.largest_score(row, line, keys.n);
                    if (saves) max_of(j + 1, first + i, c) = max == LOWEST ? LOWEST : std::max(max, rows.max[row]);
                    if (max == LOWEST) std::fill(line, line + keys.n, LOWEST);
                    else rowsum1[at] *= rows.raise_max(row, max, factor);
                    const vf scaled = broadcast(factor), offset = broadcast(max == LOWEST ? 0.0f : -rows.max[row] * factor);
                    vf total = broadcast(0.0f), total1 = total, total2 = total;
                    for (int64_t k = 0; k < keys.n; k += W) {
                        const vf y = exp2(load(line + k) * scaled + offset), x = load(d[i] + k);
                        total += y;
                        total1 += y * x;
                        total2 += load(e2[i] + k) * x;
                        if (saves) store(line + k, y);
                    }
                    rows.sum[row] += sum(total);
                    rowsum1[at] += sum(total1), rowsum2[at] += sum(total2);
                }
            }
        });
    }

    void finish_statistics() {
        for (int64_t i = 0; i < count; i++) {
            delta2[i] = 0;
            for (int64_t j = 0; j < m; j++) {
                float &first = rowsum1[j * padded + i], &second = rowsum2[j * padded + i];
                first *= inverse(rows.sum[(j + 1) * padded + i]);
                second *= inverse(rows.sum[i]);
                delta2[i] -= lam(j, i) * second;
                const int64_t at = (b * p.H + h2 * m + j) * p.T + r.t0 + i;
                p.dlam[at] = -second, p.dfirst[at] = first;
            }
        }
    }

    // A map in the second pass, times `first`: computed again, or the exponentials that were kept, with each row's factor.
    Lines map_of_second_pass(const Packed& packed, int64_t map, int64_t first, int64_t n, Chunk keys, int64_t c, float* to) const {
        const Lines lines = lines_of(e, map, c, first, keys, to);
        if constexpr (!saves) scores(packed, map, first, n, keys, lines);
        if constexpr (saves) rows.normalisers(map * padded + first, n, maxima + (map * (chunks - 1) + c) * padded, factor, normalisers);
        for (int64_t i = 0; !saves && i < n; i++) {
            const int64_t row = map * padded + first + i;
            if (fully_masked(map, first + i, keys, lines[i])) {
                std::fill(lines[i], lines[i] + keys.n, 0.0f);
                continue;
            }
            const vf scaled = broadcast(factor), normaliser = broadcast(inverse(rows.sum[row]) * weight_of_first(map, first + i));
            const vf offset = broadcast(rows.max[row] == LOWEST ? 0.0f : -rows.max[row] * factor);
            for (int64_t k = 0; k < keys.n; k += W)
                store(lines[i] + k, exp2(load(lines[i] + k) * scaled + offset) * normaliser);
        }
        return lines;
    }
    vf normaliser_of(int64_t map, int64_t i) const {
        return broadcast(saves ? normalisers[map * padded + i] * weight_of_first(map, i) : 1.0f);
    }
    static vf load_map(const float* line, vf normaliser) { return saves ? load(line) * normaliser : load(line); }

    // The second pass.
    void differentiate(const Packed& packed, const KeyGradients& totals, int64_t c, Chunk chunk) {
        find_panels(chunk);
        Base::for_strips(chunk, [&](int64_t first, int64_t n, Chunk keys) {
            map_of_second_pass(packed, 0, first, n, keys, c, p2 + first * LINE + keys.first - chunk.first);
        });
        for (int64_t j = 0; j < m; j++) {
            Base::for_strips(chunk, [&](int64_t first, int64_t n, Chunk keys) {
                const int64_t at = keys.first - chunk.first;
                const Lines signal = map_of_second_pass(packed, j + 1, first, n, keys, c, s + at);
                const Lines d = lines_of(saved_dp, j, c, first, keys, dp + at);
                if constexpr (!saves) gradient_of_map(packed, j, first, n, keys, d);
                for (int64_t i = 0; i < n; i += 2) score_gradients(c, j, first, i, at, keys, signal, d);
                add_dq(packed, j + 1, pairs ? reinterpret_cast<uint32_t*>(s) : ds1_t + first * LINE + at, first, n, keys);
            });
            add(totals.dv, p.Dv, dout_outer + j * columns(p.Dv) * Rw, difference_t, chunk);
            add(totals.dk1, p.D, q_outer + (j + 1) * wide * Rw, ds1_t, chunk);
        }
        Base::for_strips(chunk, [&](int64_t first, int64_t n, Chunk keys) {
            const int64_t at = keys.first - chunk.first;
            for (int64_t i = first; m > 1 && i < first + n; i += 2) noise_score_gradients(c, i, at, keys);
            const uint32_t* ds = pairs ? reinterpret_cast<uint32_t*>(p2 + first * LINE) : ds2_t + first * LINE + at;
            add_dq(packed, 0, ds, first, n, keys);
        });
        add(totals.dk2, p.D, q_outer, ds2_t, chunk);
    }

    // dQ += dS K
    void add_dq(const Packed& packed, int64_t map, const uint32_t* ds, int64_t first, int64_t n, Chunk keys) const {
        product<Format>(n, p.D, Base::key_words(keys.n), ds, LINE, map ? packed.k1 : packed.k2, words<Format>(padded_keys(p)),
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
            outer_product<Format>(n, Kw, of_rows + from * LINE + i * NR, LINE, outer, Rw, from,
                                to + (chunk.first + i * NR) * columns(n));
        }
    }

    // first P1 - lam P2, dS1, and dS2 (with one signal head) or this head's part of dP2 (with several).
    void score_gradients(int64_t c, int64_t j, int64_t first, int64_t i, int64_t at, Chunk keys, Lines signal, Lines d) {
        const int64_t row = first + i, to = row_words(row) * LINE + at;
        vf minus_lam[2], delta[2], second_delta[2], normaliser1[2], normaliser2[2];
        const float* second_map[2];
        for (int l = 0; l < 2; l++) {
            const bool real = r.t0 + row + l < r.t1;
            minus_lam[l] = broadcast(real ? -lam(j, row + l) : 0.0f);
            delta[l] = broadcast(real ? rowsum1[j * padded + row + l] : 0.0f);
            second_delta[l] = broadcast(real ? rowsum2[j * padded + row + l] : 0.0f);
            normaliser1[l] = normaliser_of(j + 1, row + l), normaliser2[l] = normaliser_of(0, row + l);
            second_map[l] = second_line(c, row + l, at, keys);
        }
        for (int64_t k = 0; k < keys.n; k += W) {
            vf w[2], ds[2], second[2];
            for (int l = 0; l < 2; l++) {
                if (saves) {  // the next two rows
                    __builtin_prefetch(signal[i + l + 2] + k), __builtin_prefetch(d[i + l + 2] + k);
                    __builtin_prefetch(second_map[l] + 2 * LINE + k);
                }
                const vf a = load_map(signal[i + l] + k, normaliser1[l]), x = load(d[i + l] + k);
                const vf c = load_map(second_map[l] + k, normaliser2[l]);
                w[l] = a + minus_lam[l] * c;
                ds[l] = a * (x - delta[l]);
                second[l] = m == 1 ? minus_lam[l] * c * (x - second_delta[l]) : minus_lam[l] * x;
            }
            put_two_rows<pairs>(difference_t + to + k, LINE, w[0], w[1]);
            put_two_rows<pairs>(ds1_t + to + k, LINE, ds[0], ds[1]);
            if (m == 1) put_two_rows<pairs>(ds2_t + to + k, LINE, second[0], second[1]);
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
        return lines_of(e, 0, c, row, keys, p2 + row * LINE + at).at;
    }

    // dS2 of several signal heads.
    void noise_score_gradients(int64_t c, int64_t row, int64_t at, Chunk keys) {
        vf delta[2], normaliser[2];
        const float* map[2];
        for (int l = 0; l < 2; l++) {
            delta[l] = broadcast(r.t0 + row + l < r.t1 ? delta2[row + l] : 0.0f);
            normaliser[l] = normaliser_of(0, row + l), map[l] = second_line(c, row + l, at, keys);
        }
        for (int64_t k = 0; k < keys.n; k += W) {
            vf ds[2];
            for (int l = 0; l < 2; l++) {
                ds[l] = load_map(map[l] + k, normaliser[l]) * (load(dp2 + (row + l) * LINE + at + k) - delta[l]);
                if constexpr (pairs) put_words<true>(reinterpret_cast<uint32_t*>(p2 + (row + l) * LINE), k, ds[l]);
            }
            put_two_rows<pairs>(ds2_t + row_words(row) * LINE + at + k, LINE, ds[0], ds[1]);
        }
    }

    void write(const Matrix& to, int64_t h, const float* from) const {
        for (int64_t i = 0; i < count; i++) {
            auto* line = place<Format>(to, b, h, r.t0 + i);
            for (int64_t j = 0; j < p.D; j++) put(line + j, from[i * wide + j] * p.scale);
        }
    }
};

}  // namespace
