// Forward and backward in blocks of queries, with the scores of a block against all its visible keys in cache.
//
// Both maps are normalised in cache, subtracted once in fp32, and one product with v follows. Backward recomputes the
// maps and needs one product dO v^T.

#pragma once

#include "problem.h"

namespace {

template <typename In>
struct Forward {
    static constexpr bool pairs = Words<In>::pairs;
    const Problem& p;
    int64_t padded;
    uint32_t* q;
    float *s1, *s2, *rows_out;
    float sum1[256], sum2[256];

    Forward(const Problem& problem, Workspace& workspace) : p(problem), padded(padded_rows<In>(problem.rows)) {
        q = workspace.words(padded * words<In>(p.D));
        s1 = workspace.floats(padded * longest(p));
        s2 = workspace.floats(padded * longest(p));
        rows_out = workspace.floats(padded * columns(p.Dv));
    }

    // Exponentials and row sums of a block's scores.
    void map(const Range& r, const Matrix& queries, const uint32_t* kt, int64_t b, int64_t h, float* s, float* sums) {
        const int64_t Kw = words<In>(p.D), rows = r.t1 - r.t0;
        pack_rows(at<In>(queries, b, h, r.t0), queries.by_row, rows, p.D, q);
        short_product<pairs>(padded_rows<In>(rows), r.n, Kw, q, Kw, kt + r.k0 * Kw, s, r.ldn);
        for (int64_t i = 0; i < rows; i++) sums[i] = exponentials(p, r, b, h, r.t0 + i, s + i * r.ldn);
    }

    void block(const Packed& keys, int64_t b, int64_t g, int64_t index) {
        const Range r = range_of(p, index);
        const int64_t rows = r.t1 - r.t0, m = p.H / p.Hn, noise = p.Hn / p.G;
        for (int64_t h2 = g * noise; h2 < (g + 1) * noise; h2++)
            for (int64_t h = h2 * m; h < (h2 + 1) * m; h++) {
                if (r.n == 0) {
                    write(r, b, h, false);
                    continue;
                }
                if (h == h2 * m) map(r, p.q2, keys.k2t, b, h2, s2, sum2);
                map(r, p.q1, keys.k1t, b, h, s1, sum1);
                for (int64_t i = 0; i < rows; i++) {
                    const float lam = p.lam[b * p.lam_by_batch + h * p.lam_by_head + (r.t0 + i) * p.lam_by_row];
                    subtract<pairs>(r.n, s1 + i * r.ldn, s2 + i * r.ldn, inverse(sum1[i]), inverse(sum2[i]), lam);
                }
                long_product<pairs>(padded_rows<In>(rows), p.Dv, pairs ? r.n / 2 : r.n, reinterpret_cast<uint32_t*>(s1), r.ldn,
                                    keys.v, words<In>(padded_keys(p)), pairs ? r.k0 / 2 : r.k0, rows_out,
                                    columns(p.Dv));
                write(r, b, h, true);
            }
    }

    void write(const Range& r, int64_t b, int64_t h, bool filled) {
        for (int64_t t = r.t0; t < r.t1; t++) {
            In* to = place<In>(p.out, b, h, t);
            const float* from = rows_out + (t - r.t0) * columns(p.Dv);
            for (int64_t j = 0; j < p.Dv; j++) put(to + j, filled ? from[j] : 0.0f);
        }
    }
};

template <typename In>
struct Backward {
    static constexpr bool pairs = Words<In>::pairs;
    Forward<In> forward;
    const Problem& p;
    uint32_t *q2, *q1_columns, *q2_columns, *dout, *dout_columns, *difference, *turned;
    float *s1, *s2, *dp, *dp2, *dq;

    Backward(const Problem& problem, Workspace& workspace) : forward(problem, workspace), p(problem) {
        const int64_t padded = forward.padded, n = padded * longest(p), Kw = words<In>(padded);
        q1_columns = workspace.words(Kw * columns(p.D));
        q2_columns = workspace.words(Kw * columns(p.D));
        dout = workspace.words(padded * words<In>(p.Dv));
        dout_columns = workspace.words(Kw * columns(p.Dv));
        turned = workspace.words(pairs ? n / 2 : 0);
        s1 = forward.s1, s2 = forward.s2;
        dp = workspace.floats(n);
        difference = pairs ? workspace.words(n / 2) : reinterpret_cast<uint32_t*>(dp);  // each number in its gradient's place
        dp2 = p.H == p.Hn ? s2 : workspace.floats(n);
        dq = workspace.floats(padded * columns(p.D));
    }

    static void normalise(int64_t n, float* e, float total) {
        const vf factor = broadcast(inverse(total));
        for (int64_t i = 0; i < n; i += W) store(e + i, load(e + i) * factor);
    }

    void map(const Range& r, const Matrix& queries, const uint32_t* kt, uint32_t* as_columns, int64_t b, int64_t h,
             float* s, float* sums) {
        const int64_t rows = r.t1 - r.t0;
        forward.map(r, queries, kt, b, h, s, sums);
        for (int64_t i = 0; i < rows; i++) normalise(r.n, s + i * r.ldn, sums[i]);
        for (int64_t i = rows; i < padded_rows<In>(rows); i++) std::fill(s + i * r.ldn, s + i * r.ldn + r.n, 0.0f);
        pack_columns(at<In>(queries, b, h, r.t0), queries.by_row, rows, p.D, words<In>(padded_rows<In>(rows)), as_columns);
    }

    void block(const Packed& keys, const KeyGradients& totals, int64_t b, int64_t g, int64_t index) {
        const Range r = range_of(p, index);
        if (r.n == 0) return;  // the gradients of these queries stay 0
        const int64_t rows = r.t1 - r.t0, padded = padded_rows<In>(rows), m = p.H / p.Hn, noise = p.Hn / p.G;
        const int64_t Kw = words<In>(padded), Dvw = words<In>(p.Dv);
        for (int64_t h2 = g * noise; h2 < (g + 1) * noise; h2++) {
            for (int64_t h = h2 * m; h < (h2 + 1) * m; h++) {
                if (h == h2 * m) map(r, p.q2, keys.k2t, q2_columns, b, h2, s2, forward.sum2);
                map(r, p.q1, keys.k1t, q1_columns, b, h, s1, forward.sum1);
                const In* rows_of_dout = at<In>(p.dout, b, h, r.t0);
                pack_rows(rows_of_dout, p.dout.by_row, rows, p.Dv, dout);
                pack_columns(rows_of_dout, p.dout.by_row, rows, p.Dv, Kw, dout_columns);
                short_product<pairs>(padded, r.n, Dvw, dout, Dvw, keys.vt + r.k0 * Dvw, dp, r.ldn);
                for (int64_t i = 0; i < padded; i += 2) two_rows(r, b, h, i, h == h2 * m, m == 1);
                outer_product<pairs>(r.n, p.Dv, Kw, difference, r.ldn, dout_columns, totals.dv + r.k0 * columns(p.Dv),
                                     columns(p.Dv));
                through(r, p.dq1, b, h, s1, keys.k1, q1_columns, totals.dk1);
            }
            for (int64_t i = 0; i < padded; i += 2) two_rows_of_second(r, i, m == 1);
            through(r, p.dq2, b, h2, dp2, keys.k2, q2_columns, totals.dk2);
        }
    }

    // Computes P1 - lam P2 (`difference`), dS1 (replaces P1), this head's share of dP2 (with one head: dS2), and dlam.
    void two_rows(const Range& r, int64_t b, int64_t h, int64_t i, bool first, bool only) {
        const int64_t rows = r.t1 - r.t0;
        float lam[2], delta1[2], delta2[2];
        for (int j = 0; j < 2; j++) {
            const int64_t row = i + j;
            const float *p1 = s1 + row * r.ldn, *p2 = s2 + row * r.ldn, *d = dp + row * r.ldn;
            vf total1 = broadcast(0.0f), total2 = broadcast(0.0f);
            for (int64_t k = 0; k < r.n; k += W) {
                const vf x = load(d + k);
                total1 += load(p1 + k) * x;
                total2 += load(p2 + k) * x;
            }
            delta1[j] = sum(total1), delta2[j] = sum(total2);
            const int64_t t = r.t0 + row;
            lam[j] = row < rows ? p.lam[b * p.lam_by_batch + h * p.lam_by_head + t * p.lam_by_row] : 0.0f;
            if (row < rows) p.dlam[(b * p.H + h) * p.T + t] = -delta2[j];
        }
        float* p1[2] = {s1 + i * r.ldn, s1 + (i + 1) * r.ldn};
        const float *p2 = s2 + i * r.ldn, *d = dp + i * r.ldn;
        float* second = dp2 + i * r.ldn;
        for (int64_t k = 0; k < r.n; k += W) {
            vf w[2], ds[2];
            for (int j = 0; j < 2; j++) {
                const vf a = load(p1[j] + k), c = load(p2 + j * r.ldn + k), x = load(d + j * r.ldn + k);
                const vf minus_lam = broadcast(-lam[j]);
                w[j] = a + minus_lam * c;
                ds[j] = a * (x - broadcast(delta1[j]));
                float* to = second + j * r.ldn + k;
                if (only)
                    store(to, minus_lam * c * (x - broadcast(delta2[j])));
                else
                    store(to, first ? minus_lam * x : load(to) + minus_lam * x);
            }
            if constexpr (pairs) {
                put_two_rows(difference + i / 2 * r.ldn + k, w[0], w[1]);
                put_two_rows(turned + i / 2 * r.ldn + k, ds[0], ds[1]);
            } else
                for (int j = 0; j < 2; j++) store(reinterpret_cast<float*>(difference) + (i + j) * r.ldn + k, w[j]);
            for (int j = 0; j < 2; j++) put_words<pairs>(reinterpret_cast<uint32_t*>(p1[j]), k, ds[j]);
        }
    }

    // Replaces dP2 (with one signal head: dS2 in floats) by dS2 as words.
    void two_rows_of_second(const Range& r, int64_t i, bool only) {
        if (only && !pairs) return;
        float delta[2] = {0, 0};
        for (int j = 0; j < 2 && !only; j++) {
            vf total = broadcast(0.0f);
            for (int64_t k = 0; k < r.n; k += W) total += load(s2 + (i + j) * r.ldn + k) * load(dp2 + (i + j) * r.ldn + k);
            delta[j] = sum(total);
        }
        for (int64_t k = 0; k < r.n; k += W) {
            vf ds[2];
            for (int j = 0; j < 2; j++) {
                const vf x = load(dp2 + (i + j) * r.ldn + k);
                ds[j] = only ? x : load(s2 + (i + j) * r.ldn + k) * (x - broadcast(delta[j]));
            }
            if constexpr (pairs) put_two_rows(turned + i / 2 * r.ldn + k, ds[0], ds[1]);
            for (int j = 0; j < 2; j++)
                put_words<pairs>(reinterpret_cast<uint32_t*>(dp2 + (i + j) * r.ldn), k, ds[j]);
        }
    }

    // Writes dQ = dS K scale; dK += dS^T Q, which is scaled at the end.
    void through(const Range& r, const Matrix& to, int64_t b, int64_t h, const float* ds, const uint32_t* k,
                 const uint32_t* q_columns, float* dk) {
        const int64_t rows = r.t1 - r.t0, padded = padded_rows<In>(rows), wide = columns(p.D);
        const uint32_t* words_of_ds = reinterpret_cast<const uint32_t*>(ds);
        long_product<pairs>(padded, p.D, pairs ? r.n / 2 : r.n, words_of_ds, r.ldn, k, words<In>(padded_keys(p)),
                            pairs ? r.k0 / 2 : r.k0, dq, wide);
        for (int64_t i = 0; i < rows; i++) {
            In* row = place<In>(to, b, h, r.t0 + i);
            for (int64_t j = 0; j < p.D; j++) put(row + j, dq[i * wide + j] * p.scale);
        }
        outer_product<pairs>(r.n, p.D, words<In>(padded), pairs ? turned : words_of_ds, r.ldn, q_columns,
                             dk + r.k0 * wide, wide);
    }
};

}  // namespace
