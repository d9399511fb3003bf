// Decoding: a few queries over a cache. Reads each key and value once and packs nothing.

#pragma once

#include "problem.h"

#include <omp.h>

namespace {

// Heads that share a key/value head are computed together, at most MAX_ROWS rows of either map.
constexpr int MAX_ROWS = 8;

// Replaces e1 by e1 c1 - lam e2 c2. Equal maps cancel exactly.
inline void subtract(int64_t n, float* e1, const float* e2, float c1, float c2, float lam) {
    const vf v1 = broadcast(c1), v2 = broadcast(c2), minus_lam = broadcast(-lam);
    for (int64_t i = 0; i < n; i += W) {
        const vf p1 = load(e1 + i) * v1, p2 = load(e2 + i) * v2;
        store(e1 + i, multiplied_and_added(minus_lam, p2, p1));
    }
}

template <typename Format>
struct Decode {
    using Number = typename Format::Number;
    const Problem& p;
    const HeadOutput& output;
    float lam_of_layer;
    Range r;
    int64_t rows1, rows2, wide;  // rows of the maps of a key/value head; D padded to vectors
    float *q, *s1, *s2, *total;

    Decode(const Problem& problem, const HeadOutput& output, float lam_of_layer, Workspace& workspace)
        : p(problem), output(output), lam_of_layer(lam_of_layer) {
        r = range_of(p, 0);
        rows1 = p.H / p.G * p.T, rows2 = p.Hn / p.G * p.T, wide = round_up(p.D, W);
        q = workspace.floats(MAX_ROWS * wide);
        s1 = workspace.floats(MAX_ROWS * (r.ldn + NR));
        s2 = workspace.floats(MAX_ROWS * (r.ldn + NR));
        total = workspace.floats(MAX_ROWS * round_up(p.Dv, W));
    }

    template <int rows>
    void scores(const Number* k, int64_t by_row, int64_t keys, float* s) const {
        for (int64_t i = 0; i < keys; i++, k += by_row) {
            vf dots[rows];
            for (int j = 0; j < rows; j++) dots[j] = broadcast(0.0f);
            for (int64_t d = 0; d < p.D; d += W) {
                const vf x = load_first(k + d, p.D - d);
                for (int j = 0; j < rows; j++) dots[j] += x * load(q + j * wide + d);
            }
            for (int j = 0; j < rows; j++) s[j * r.ldn + i] = sum(dots[j]);
        }
    }

    template <int rows>
    void values(const Number* v, int64_t by_row, int64_t keys, const float* weights) const {
        for (int64_t d = 0; d < p.Dv; d += W) {  // a strip of columns at a time, its sums in registers
            vf sums[rows];
            for (int j = 0; j < rows; j++) sums[j] = load(total + j * round_up(p.Dv, W) + d);
            const Number* x = v + d;
            if (p.Dv - d >= W)
                for (int64_t i = 0; i < keys; i++, x += by_row)
                    for (int j = 0; j < rows; j++) sums[j] += broadcast(weights[j * r.ldn + i]) * load_wide(x);
            else
                for (int64_t i = 0; i < keys; i++, x += by_row)
                    for (int j = 0; j < rows; j++)
                        sums[j] += broadcast(weights[j * r.ldn + i]) * load_first(x, p.Dv - d);
            for (int j = 0; j < rows; j++) store(total + j * round_up(p.Dv, W) + d, sums[j]);
        }
    }

    template <int rows>
    void some_scores(int64_t n, const Number* k, int64_t by_row, int64_t keys, float* s) const {
        if constexpr (rows < MAX_ROWS)
            if (n > rows) return some_scores<rows + 1>(n, k, by_row, keys, s);
        scores<rows>(k, by_row, keys, s);
    }
    template <int rows>
    void some_values(int64_t n, const Number* v, int64_t by_row, int64_t keys, const float* weights) const {
        if constexpr (rows < MAX_ROWS)
            if (n > rows) return some_values<rows + 1>(n, v, by_row, keys, weights);
        values<rows>(v, by_row, keys, weights);
    }

    void map(const Matrix& queries, const Matrix& keys, int64_t rows, int64_t b, int64_t g, float* s, float* sums) {
        const int64_t heads = rows / p.T, seen = std::min(p.S - r.k0, r.n);
        for (int64_t j = 0; j < rows; j++) {
            const Number* x = at<Format>(queries, b, g * heads + j / p.T, j % p.T);
            for (int64_t d = 0; d < wide; d++) q[j * wide + d] = d < p.D ? widen(x[d]) : 0.0f;
        }
        some_scores<1>(rows, at<Format>(keys, b, g, r.k0), keys.row, seen, s);
        for (int64_t j = 0; j < rows; j++) sums[j] = exponentials(p, r, b, g * heads + j / p.T, j % p.T, s + j * r.ldn);
    }

    void head(int64_t b, int64_t g) {
        float sum1[MAX_ROWS], sum2[MAX_ROWS];
        const int64_t seen = std::min(p.S - r.k0, r.n), heads = p.H / p.G, padded = round_up(p.Dv, W);
        const int64_t m = p.H / p.Hn;
        std::fill(total, total + MAX_ROWS * padded, 0.0f);
        if (r.n) {
            map(p.q2, p.k2, rows2, b, g, s2, sum2);
            map(p.q1, p.k1, rows1, b, g, s1, sum1);
            for (int64_t j = 0; j < rows1; j++) {
                const int64_t h = g * heads + j / p.T, t = j % p.T, j2 = j / p.T / m * p.T + t;
                const float c1 = inverse(sum1[j]) * p.first.at(b, h, t, 1);
                subtract(r.n, s1 + j * r.ldn, s2 + j2 * r.ldn, c1, inverse(sum2[j2]), lam_of_layer + p.lam.at(b, h, t, 0));
            }
            const Number* v = at<Format>(p.v, b, g, r.k0);
            for (int64_t i = 0; i < seen; i += DEEP)  // so that a strip of values stays in cache
                some_values<1>(rows1, v + i * p.v.row, p.v.row, std::min<int64_t>(DEEP, seen - i), s1 + i);
        }
        for (int64_t j = 0; j < rows1; j++) {
            const int64_t h = g * heads + j / p.T, t = j % p.T;
            Number* to = place<Format>(p.out, b, h, t);
            if (output.normed) norm(total + j * padded);
            const float gain = output.gain * output.gate.at(b, h, t, 1);
            for (int64_t d = 0; d < p.Dv; d++) put(to + d, gain * total[j * padded + d]);
        }
    }

    // x / rms(x) * weights, of a head's output.
    void norm(float* x) const {
        float squares = 0;
        for (int64_t d = 0; d < p.Dv; d++) squares += x[d] * x[d];
        const float by = 1 / std::sqrt(squares / p.Dv + output.eps);
        for (int64_t d = 0; d < p.Dv; d++) {
            const float w = !output.norm_weight       ? 1.0f
                            : output.norm_weight_bf16 ? widen(static_cast<const bf16*>(output.norm_weight)[d])
                                                      : static_cast<const float*>(output.norm_weight)[d];
            x[d] *= by * w;
        }
    }
};

// The part of lambda that all heads of a layer share.
inline float lambda_of_layer(const HeadOutput& output) {
    if (!output.lambda_size) return output.lambda_init;
    float first = 0, second = 0;
    for (int64_t i = 0; i < output.lambda_size; i++) {
        first += output.lambda_q1[i] * output.lambda_k1[i];
        second += output.lambda_q2[i] * output.lambda_k2[i];
    }
    return std::exp(first) - std::exp(second) + output.lambda_init;
}

template <typename Format>
int64_t decode_bytes(const Problem& p, const HeadOutput& output) {
    Workspace workspace(nullptr);
    Decode<Format>(p, output, 0, workspace);
    return reinterpret_cast<intptr_t>(workspace.next);
}

template <typename Format>
void decode(const Problem& p, const HeadOutput& output, char* start) {
    const int64_t bytes = decode_bytes<Format>(p, output);
    const float lam = lambda_of_layer(output);
#pragma omp parallel for schedule(dynamic, 1) num_threads(p.threads) if (p.threads > 1)
    for (int64_t head = 0; head < p.B * p.G; head++) {
        Workspace workspace(start + bytes * omp_get_thread_num());
        Decode<Format>(p, output, lam, workspace).head(head / p.G, head % p.G);
    }
}

}  // namespace
