// Forward and backward for processors that multiply bf16 in tiles (AMX). Products are cheap there, so scores are
// recomputed rather than kept, and each step works within the cache.
//
// Keys are processed in chunks. Forward: the exponentials of a chunk are relative to the running row maximum and are kept
// in half precision until the row sum is known; then the maps are subtracted in fp32, and one product with v follows.
// Backward: a first pass over the keys computes the row statistics (maximum, sum, and rowsum of dP times each map), a
// second one recomputes the scores and computes the gradients.

#pragma once

#include "problem.h"

namespace {

constexpr int64_t STRIP = 2 * TILE;  // queries of a product

// C[STRIP][n] (+)= A B, with B in panels at b + column * Kb, from word k0 of Kb.
inline void strip_product(int64_t n, int64_t Kw, const uint32_t* a, int64_t lda, const uint32_t* b, int64_t Kb,
                          int64_t k0, float* c, int64_t ldc, bool add) {
    for (int64_t j = 0; j < columns(n); j += NR)
        if (width(n, j) == NR)
            in_tiles<2, 2>(Kw, a, lda, b + j * Kb + k0 * NR, NR, c + j, ldc, add);
        else
            in_tiles<2, 1>(Kw, a, lda, b + j * Kb + k0 * HALF, HALF, c + j, ldc, add);
}

// C += A B, with A [n][Kw], lda words from one row to the next, B [Kw][keys] and C in panels, [keys / NR][n][NR].
inline void outer_product_in_tiles(int64_t n, int64_t keys, int64_t Kw, const uint32_t* a, int64_t lda,
                                   const uint32_t* b, int64_t ldb, float* c) {
    for (int64_t i = 0; i < keys; i += NR)
        for (int64_t j = 0; j < columns(n); j += NR) {
            float* to = c + i * columns(n) + j * NR;
            if (width(n, j) == NR)
                in_tiles<2, 2>(Kw, a + j * lda, lda, b + i, ldb, to, NR, true);
            else
                in_tiles<1, 2>(Kw, a + j * lda, lda, b + i, ldb, to, NR, true);
        }
}

struct Chunk {
    int64_t first, n;  // keys, multiples of NR
};

// The number of leading keys of a chunk, a multiple of NR, that queries t0 to t1 - 1 may see.
inline int64_t seen(const Problem& p, int64_t t0, int64_t t1, Chunk chunk) {
    if (t0 >= t1) return 0;
    const int64_t last = p.causal ? t1 + p.S - p.T - chunk.first : chunk.n;
    return std::min(chunk.n, up(std::max<int64_t>(0, last), NR));
}

// Online softmax of a row, chunk by chunk.
struct Running {
    float top = LOWEST, sum = 0;

    // Updates the row maximum; returns the factor that rescales earlier sums.
    float rise(float to, float factor) {
        if (!(to > top)) return 1;
        const float by = top == LOWEST ? 0.0f : std::exp2((top - to) * factor);
        top = to, sum *= by;
        return by;
    }
    // Largest of n scores, or LOWEST if all are masked; in that case a NaN among them makes the sum NaN.
    float look(const float* s, int64_t n) {
        const float found = largest(s, n);
        if (found == LOWEST && any_nan(s, n)) sum = NAN;
        return found;
    }
};

// Exponentials, at most 1, are kept in half precision until their row sums are known.
inline void store_half(uint16_t* p, vf x) {
#ifdef __AVX512F__
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#endif
}
inline vf load_half(const uint16_t* p) {
#ifdef __AVX512F__
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
    return broadcast(0.0f);
#endif
}

template <typename In>
struct ForwardInTiles {
    static constexpr int64_t CHUNK = 512;         // keys at a time
    static constexpr int64_t LINE = CHUNK + HALF;  // numbers from one row of a chunk to the next; not a power of two
    const Problem& p;
    int64_t padded, Dw, wide, line, chunks;
    uint32_t* q;
    uint16_t *e1, *e2;      // exponentials of the block, [padded][line]
    float *top1, *top2;     // that those of a chunk are relative to, [padded][chunks]
    Running *row1, *row2;
    float *s, *total;       // of a strip and a chunk; of the block

    ForwardInTiles(const Problem& problem, Workspace& workspace)
        : p(problem), padded(padded_rows<In>(p.rows)), Dw(words<In>(p.D)), wide(columns(p.Dv)), line(longest(p) + NR),
          chunks(longest(p) / CHUNK + 1) {
        q = workspace.words(padded * Dw);
        e1 = reinterpret_cast<uint16_t*>(workspace.take(2 * padded * line));
        e2 = reinterpret_cast<uint16_t*>(workspace.take(2 * padded * line));
        top1 = workspace.floats(padded * chunks), top2 = workspace.floats(padded * chunks);
        row1 = reinterpret_cast<Running*>(workspace.take(sizeof(Running) * padded));
        row2 = reinterpret_cast<Running*>(workspace.take(sizeof(Running) * padded));
        s = workspace.floats(STRIP * LINE), total = workspace.floats(padded * wide);
    }

    Range r;
    int64_t seen_by(int64_t first, Chunk chunk) const {
        return seen(p, r.t0 + first, std::min(r.t0 + first + STRIP, r.t1), chunk);
    }
    template <typename Work>
    void for_chunks(Work work) const {
        for (int64_t at = 0; at < r.n; at += CHUNK) work(at / CHUNK, Chunk{r.k0 + at, std::min(CHUNK, r.n - at)});
    }

    void block(const Packed& keys, int64_t b, int64_t g, int64_t index) {
        r = range_of(p, index);
        const int64_t noise = p.Hn / p.G, m = p.H / p.Hn;
        for (int64_t h2 = g * noise; h2 < (g + 1) * noise; h2++) {
            map(p.q2, keys.k2t, b, h2, e2, top2, row2);
            for (int64_t h = h2 * m; h < (h2 + 1) * m; h++) {
                map(p.q1, keys.k1t, b, h, e1, top1, row1);
                combine(keys, b, h);
                for (int64_t i = 0; i < r.t1 - r.t0; i++) write(b, h, i);
            }
        }
    }

    // Exponentials of a map, relative to the running row maximum, and their sums.
    void map(const Matrix& queries, const uint32_t* kt, int64_t b, int64_t h, uint16_t* e, float* top, Running* row) {
        pack_rows(at<In>(queries, b, h, r.t0), queries.by_row, r.t1 - r.t0, p.D, q);
        std::fill(row, row + padded, Running());
        for_chunks([&](int64_t c, Chunk chunk) {
            for (int64_t first = 0; first < r.t1 - r.t0; first += STRIP) {
                const int64_t n = seen_by(first, chunk);
                if (n == 0) continue;
                strip_product(n, Dw, q + first * Dw, Dw, kt + chunk.first * Dw, Dw, 0, s, LINE, false);
                for (int64_t i = 0; i < STRIP; i++) {
                    const int64_t at = first + i;
                    uint16_t* to = e + at * line + chunk.first - r.k0;
                    top[at * chunks + c] = weigh(b, h, at, {chunk.first, n}, s + i * LINE, row[at], to);
                }
            }
        });
    }

    float weigh(int64_t b, int64_t h, int64_t i, Chunk chunk, float* from, Running& row, uint16_t* to) {
        const float factor = log2_scale(p);
        const bool any = r.t0 + i < r.t1 && mask_scores(p, chunk.first, chunk.n, b, h, r.t0 + i, from);
        const float top = any ? row.look(from, chunk.n) : LOWEST;
        if (top == LOWEST) {
            std::fill(to, to + chunk.n, 0);
            return LOWEST;
        }
        row.rise(top, factor);
        const vf scaled = broadcast(factor), offset = broadcast(-row.top * factor);
        vf sums[2] = {broadcast(0.0f), broadcast(0.0f)};
        for (int64_t k = 0; k < chunk.n; k += 2 * W)
            for (int j = 0; j < 2; j++) {
                const vf e = exp2(load(from + k + j * W) * scaled + offset);
                sums[j] += e;
                store_half(to + k + j * W, e);
            }
        row.sum += sum(sums[0] + sums[1]);
        return row.top;
    }

    // Factor for exponentials that are relative to `top`.
    float share(const Running& row, float top) const {
        if (row.sum != row.sum) return NAN;
        return top == LOWEST ? 0.0f : inverse(row.sum) * std::exp2((top - row.top) * log2_scale(p));
    }

    // (P1 - lam P2) v
    void combine(const Packed& keys, int64_t b, int64_t h) {
        const int64_t Kb = words<In>(padded_keys(p));
        std::fill(total, total + padded * wide, 0.0f);
        for_chunks([&](int64_t c, Chunk chunk) {
            for (int64_t first = 0; first < r.t1 - r.t0; first += STRIP) {
                const int64_t n = seen_by(first, chunk);
                if (n == 0) continue;
                for (int64_t i = 0; i < STRIP; i++) {
                    const int64_t at = first + i, t = std::min(r.t0 + at, p.T - 1), key = at * line + chunk.first - r.k0;
                    const float lam = p.lam[b * p.lam_by_batch + h * p.lam_by_head + t * p.lam_by_row];
                    const vf c1 = broadcast(share(row1[at], top1[at * chunks + c]));
                    const vf c2 = broadcast(share(row2[at], top2[at * chunks + c])), minus_lam = broadcast(-lam);
                    for (int64_t k = 0; k < n; k += W) {
                        const vf p1 = load_half(e1 + key + k) * c1, p2 = load_half(e2 + key + k) * c2;
                        put_words<true>(reinterpret_cast<uint32_t*>(s + i * LINE), k,
                                        multiplied_and_added(minus_lam, p2, p1));
                    }
                }
                strip_product(p.Dv, n / 2, reinterpret_cast<uint32_t*>(s), LINE, keys.v, Kb, chunk.first / 2,
                              total + first * wide, wide, true);
            }
        });
    }

    void write(int64_t b, int64_t h, int64_t i) {
        uint32_t to[128];
        for (int64_t j = 0; j < wide; j += W) put_words<true>(to, j, load(total + i * wide + j));
        std::memcpy(place<In>(p.out, b, h, r.t0 + i), to, sizeof(In) * p.Dv);
    }
};

template <typename In>
struct BackwardInTiles {
    static constexpr int64_t CHUNK = 256, LINE = CHUNK + HALF;  // as above
    const Problem& p;
    int64_t padded, m, Dw, Dvw, Rw, wide;  // Rw: words of a contraction over the block's queries; wide: columns of dq
    uint32_t *q, *q_outer;                 // of each map: first a noise head's, then those of its m signal heads
    uint32_t *dout, *dout_outer;           // of each signal head
    uint32_t *difference, *turned1, *turned2;  // of the block and a chunk: P1 - lam P2, dS1, dS2, [words of rows][keys]
    float *s, *dp;                         // of a strip and a chunk
    float *p2, *dp2;                       // of the block and a chunk
    float* dq;                             // of each map
    Running* rows;                         // of each map
    float *along1, *along2;                // of each signal head: sums of e1 dP and of e2 dP, then of P1 dP and P2 dP
    float* delta2;

    BackwardInTiles(const Problem& problem, Workspace& workspace)
        : p(problem), padded(padded_rows<In>(p.rows)), m(p.H / p.Hn), Dw(words<In>(p.D)), Dvw(words<In>(p.Dv)),
          Rw(words<In>(padded)), wide(columns(p.D)) {
        q = workspace.words((m + 1) * padded * Dw), q_outer = workspace.words((m + 1) * wide * Rw);
        dout = workspace.words(m * padded * Dvw), dout_outer = workspace.words(m * columns(p.Dv) * Rw);
        difference = workspace.words(Rw * LINE), turned1 = workspace.words(Rw * LINE), turned2 = workspace.words(Rw * LINE);
        s = workspace.floats(STRIP * LINE), dp = workspace.floats(STRIP * LINE);
        p2 = workspace.floats(padded * LINE), dp2 = workspace.floats(m > 1 ? padded * LINE : 0);
        dq = workspace.floats((m + 1) * padded * wide);
        rows = reinterpret_cast<Running*>(workspace.take(sizeof(Running) * (m + 1) * padded));
        along1 = workspace.floats(m * padded), along2 = workspace.floats(m * padded), delta2 = workspace.floats(padded);
    }

    int64_t b, h2;  // that are worked on
    Range r;
    float lam(int64_t j, int64_t i) const {
        return p.lam[b * p.lam_by_batch + (h2 * m + j) * p.lam_by_head + (r.t0 + i) * p.lam_by_row];
    }
    int64_t seen_by(int64_t first, Chunk chunk) const {
        return seen(p, r.t0 + first, std::min(r.t0 + first + STRIP, r.t1), chunk);
    }

    void block(const Packed& keys, const KeyGradients& totals, int64_t batch, int64_t g, int64_t index) {
        r = range_of(p, index), b = batch;
        if (r.n == 0) return;  // the gradients of these queries stay 0
        const int64_t noise = p.Hn / p.G, end = r.k0 + r.n;
        for (h2 = g * noise; h2 < (g + 1) * noise; h2++) {
            pack();
            for (int64_t first = r.k0; first < end; first += CHUNK)
                look(keys, {first, std::min(CHUNK, end - first)});
            sum_up();
            for (int64_t first = r.k0; first < end; first += CHUNK)
                differentiate(keys, totals, {first, std::min(CHUNK, end - first)});
            write(p.dq2, h2, dq);
            for (int64_t j = 0; j < m; j++) write(p.dq1, h2 * m + j, dq + (j + 1) * padded * wide);
        }
    }

    void pack() {
        const int64_t count = r.t1 - r.t0;
        for (int64_t map = 0; map <= m; map++) {
            const Matrix& from = map ? p.q1 : p.q2;
            const In* x = at<In>(from, b, map ? h2 * m + map - 1 : h2, r.t0);
            pack_rows(x, from.by_row, count, p.D, q + map * padded * Dw);
            pack_outer(x, from.by_row, count, p.D, Rw, q_outer + map * wide * Rw);
        }
        for (int64_t j = 0; j < m; j++) {
            const In* x = at<In>(p.dout, b, h2 * m + j, r.t0);
            pack_rows(x, p.dout.by_row, count, p.Dv, dout + j * padded * Dvw);
            pack_outer(x, p.dout.by_row, count, p.Dv, Rw, dout_outer + j * columns(p.Dv) * Rw);
        }
        std::fill(rows, rows + (m + 1) * padded, Running());
        std::fill(along1, along1 + m * padded, 0.0f), std::fill(along2, along2 + m * padded, 0.0f);
        std::fill(dq, dq + (m + 1) * padded * wide, 0.0f);
    }

    void scores(const Packed& keys, int64_t map, int64_t first, int64_t n, Chunk chunk, float* to) const {
        const uint32_t* kt = map ? keys.k1t : keys.k2t;
        strip_product(n, Dw, q + (map * padded + first) * Dw, Dw, kt + chunk.first * Dw, Dw, 0, to, LINE, false);
    }
    void gradient_of_map(const Packed& keys, int64_t j, int64_t first, int64_t n, Chunk chunk) const {
        strip_product(n, Dvw, dout + (j * padded + first) * Dvw, Dvw, keys.vt + chunk.first * Dvw, Dvw, 0, dp, LINE,
                      false);
    }
    bool hides(int64_t map, int64_t i, int64_t n, Chunk chunk, float* line) const {
        const int64_t t = r.t0 + i;
        return t >= r.t1 || !mask_scores(p, chunk.first, n, b, map ? h2 * m + map - 1 : h2, t, line);
    }

    // The first pass.
    void look(const Packed& keys, Chunk chunk) {
        const float factor = log2_scale(p);
        for (int64_t first = 0; first < r.t1 - r.t0; first += STRIP) {
            const int64_t n = seen_by(first, chunk);
            if (n == 0) continue;
            float* e2 = p2 + first * LINE;
            scores(keys, 0, first, n, chunk, e2);
            for (int64_t i = 0; i < STRIP; i++) {
                Running& row = rows[first + i];
                float* line = e2 + i * LINE;
                const float top = hides(0, first + i, n, chunk, line) ? LOWEST : row.look(line, n);
                if (top == LOWEST) {
                    std::fill(line, line + n, 0.0f);
                    continue;
                }
                const float by = row.rise(top, factor);
                for (int64_t j = 0; j < m; j++) along2[j * padded + first + i] *= by;
                const vf scaled = broadcast(factor), offset = broadcast(-row.top * factor);
                vf total = broadcast(0.0f);
                for (int64_t k = 0; k < n; k += W) {
                    const vf e = exp2(load(line + k) * scaled + offset);
                    total += e;
                    store(line + k, e);
                }
                row.sum += sum(total);
            }
            for (int64_t j = 0; j < m; j++) {
                scores(keys, j + 1, first, n, chunk, s);
                gradient_of_map(keys, j, first, n, chunk);
                for (int64_t i = 0; i < STRIP; i++) {
                    const int64_t at = j * padded + first + i;
                    Running& row = rows[padded + at];
                    float *line = s + i * LINE, *second = e2 + i * LINE, *d = dp + i * LINE;
                    const float top = hides(j + 1, first + i, n, chunk, line) ? LOWEST : row.look(line, n);
                    if (top == LOWEST) std::fill(line, line + n, LOWEST);
                    else along1[at] *= row.rise(top, factor);
                    const vf scaled = broadcast(factor), offset = broadcast(top == LOWEST ? 0.0f : -row.top * factor);
                    vf total = broadcast(0.0f), total1 = total, total2 = total;
                    for (int64_t k = 0; k < n; k += W) {
                        const vf e = exp2(load(line + k) * scaled + offset), x = load(d + k);
                        total += e;
                        total1 += e * x;
                        total2 += load(second + k) * x;
                    }
                    row.sum += sum(total);
                    along1[at] += sum(total1), along2[at] += sum(total2);
                }
            }
        }
    }

    void sum_up() {
        for (int64_t i = 0; i < r.t1 - r.t0; i++) {
            delta2[i] = 0;
            for (int64_t j = 0; j < m; j++) {
                float &first = along1[j * padded + i], &second = along2[j * padded + i];
                first *= inverse(rows[(j + 1) * padded + i].sum);
                second *= inverse(rows[i].sum);
                delta2[i] -= lam(j, i) * second;
                p.dlam[(b * p.H + h2 * m + j) * p.T + r.t0 + i] = -second;
            }
        }
    }

    // Replaces the scores of a row by its map.
    void normalise(int64_t map, int64_t i, int64_t n, Chunk chunk, float* line) const {
        const Running& row = rows[map * padded + i];
        if (hides(map, i, n, chunk, line)) {
            std::fill(line, line + n, 0.0f);
            return;
        }
        const float factor = log2_scale(p);
        const vf scaled = broadcast(factor), offset = broadcast(row.top == LOWEST ? 0.0f : -row.top * factor);
        const vf share = broadcast(inverse(row.sum));
        for (int64_t k = 0; k < n; k += W) store(line + k, exp2(load(line + k) * scaled + offset) * share);
    }

    // The second pass.
    void differentiate(const Packed& keys, const KeyGradients& totals, Chunk chunk) {
        const int64_t Kb = words<In>(padded_keys(p)), k0 = chunk.first / 2;
        int64_t skipped = 0;  // queries that see nothing of the chunk
        while (skipped < r.t1 - r.t0 && seen_by(skipped, chunk) == 0) skipped += STRIP;
        if (skipped >= r.t1 - r.t0) return;
        const int64_t Kw = (padded - skipped) / 2, from = skipped / 2;
        const auto add = [&](float* to, int64_t n, const uint32_t* outer, const uint32_t* from_rows) {
            outer_product_in_tiles(n, chunk.n, Kw, outer + from, Rw, from_rows + from * LINE, LINE,
                                   to + chunk.first * columns(n));
        };
        const auto strips = [&](auto work) {
            for (int64_t first = skipped; first < padded; first += STRIP) work(first, seen_by(first, chunk));
        };
        strips([&](int64_t first, int64_t n) {
            if (n) scores(keys, 0, first, n, chunk, p2 + first * LINE);
            for (int64_t i = first; n && i < first + STRIP; i++) normalise(0, i, n, chunk, p2 + i * LINE);
        });
        for (int64_t j = 0; j < m; j++) {
            strips([&](int64_t first, int64_t n) {
                if (n) scores(keys, j + 1, first, n, chunk, s), gradient_of_map(keys, j, first, n, chunk);
                for (int64_t i = 0; n && i < STRIP; i++) normalise(j + 1, first + i, n, chunk, s + i * LINE);
                for (int64_t i = 0; i < STRIP; i += 2) two_rows(j, first, i, n, chunk.n);
                float* to = dq + ((j + 1) * padded + first) * wide;
                if (n) strip_product(p.D, n / 2, reinterpret_cast<uint32_t*>(s), LINE, keys.k1, Kb, k0, to, wide, true);
            });
            add(totals.dv, p.Dv, dout_outer + j * columns(p.Dv) * Rw, difference);
            add(totals.dk1, p.D, q_outer + (j + 1) * wide * Rw, turned1);
        }
        strips([&](int64_t first, int64_t n) {
            for (int64_t i = first; m > 1 && i < first + STRIP; i += 2) two_rows_of_second(i, n, chunk.n);
            const uint32_t* ds = reinterpret_cast<uint32_t*>(p2 + first * LINE);
            if (n) strip_product(p.D, n / 2, ds, LINE, keys.k2, Kb, k0, dq + first * wide, wide, true);
        });
        add(totals.dk2, p.D, q_outer, turned2);
    }

    static void clear(uint32_t* line, int64_t n, int64_t all) { std::fill(line + n, line + all, 0u); }

    // P1 - lam P2, dS1, and dS2 (with one signal head) or this head's share of dP2 (with several).
    void two_rows(int64_t j, int64_t first, int64_t i, int64_t n, int64_t all) {
        const int64_t row = first + i, at = row / 2 * LINE;
        vf minus_lam[2], delta[2], second_delta[2];
        for (int l = 0; l < 2; l++) {
            const bool real = r.t0 + row + l < r.t1;
            minus_lam[l] = broadcast(real ? -lam(j, row + l) : 0.0f);
            delta[l] = broadcast(real ? along1[j * padded + row + l] : 0.0f);
            second_delta[l] = broadcast(real ? along2[j * padded + row + l] : 0.0f);
        }
        for (int64_t k = 0; k < n; k += W) {
            vf w[2], ds[2], second[2];
            for (int l = 0; l < 2; l++) {
                const vf a = load(s + (i + l) * LINE + k), x = load(dp + (i + l) * LINE + k);
                const vf c = load(p2 + (row + l) * LINE + k);
                w[l] = a + minus_lam[l] * c;
                ds[l] = a * (x - delta[l]);
                second[l] = m == 1 ? minus_lam[l] * c * (x - second_delta[l]) : minus_lam[l] * x;
                put_words<true>(reinterpret_cast<uint32_t*>(s + (i + l) * LINE), k, ds[l]);
            }
            put_two_rows(difference + at + k, w[0], w[1]);
            put_two_rows(turned1 + at + k, ds[0], ds[1]);
            if (m == 1) put_two_rows(turned2 + at + k, second[0], second[1]);
            for (int l = 0; l < 2; l++)
                if (m == 1)
                    put_words<true>(reinterpret_cast<uint32_t*>(p2 + (row + l) * LINE), k, second[l]);
                else {
                    float* to = dp2 + (row + l) * LINE + k;
                    store(to, j ? load(to) + second[l] : second[l]);
                }
        }
        clear(difference + at, n, all), clear(turned1 + at, n, all), clear(turned2 + at, n, all);
    }

    // Replaces P2 by dS2 of several signal heads, as words.
    void two_rows_of_second(int64_t row, int64_t n, int64_t all) {
        vf delta[2];
        for (int l = 0; l < 2; l++) delta[l] = broadcast(r.t0 + row + l < r.t1 ? delta2[row + l] : 0.0f);
        for (int64_t k = 0; k < n; k += W) {
            vf ds[2];
            for (int l = 0; l < 2; l++) {
                float* line = p2 + (row + l) * LINE;
                ds[l] = load(line + k) * (load(dp2 + (row + l) * LINE + k) - delta[l]);
                put_words<true>(reinterpret_cast<uint32_t*>(line), k, ds[l]);
            }
            put_two_rows(turned2 + row / 2 * LINE + k, ds[0], ds[1]);
        }
        clear(turned2 + row / 2 * LINE, n, all);
    }

    void write(const Matrix& to, int64_t h, const float* from) const {
        uint32_t line[128];
        for (int64_t i = 0; i < r.t1 - r.t0; i++) {
            for (int64_t j = 0; j < wide; j += W)
                put_words<true>(line, j, load(from + i * wide + j) * broadcast(p.scale));
            std::memcpy(place<In>(to, b, h, r.t0 + i), line, sizeof(In) * p.D);
        }
    }
};

}  // namespace
