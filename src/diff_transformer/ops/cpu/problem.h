// The call as Python describes it, the keys that a block of queries can see, softmax of a row, and the workspace.
//
// Shapes: B batch, H signal heads, Hn noise heads, G key/value heads, T queries, S keys, D, Dv widths,
// m = H / Hn signal heads that share a noise head.

#pragma once

#include "products.h"

extern "C" {
struct Matrix {  // [B, heads, rows, columns]; the numbers of a row are contiguous
    void* data;
    int64_t batch, head, row;  // strides, in numbers
};

struct RowWeights {  // [B, H, T], fp32; strides may be 0; data null: none
    const float* data;
    int64_t batch, head, row;

    float at(int64_t b, int64_t h, int64_t t, float otherwise) const {
        return data ? data[b * batch + h * head + t * row] : otherwise;
    }
};

// Differs between heads only if Hn == H.
struct Mask {
    const void* data;  // bool, or float that is added to the scaled scores; null: none
    int64_t batch, head, row, key;
    int64_t additive;
};

struct Problem {
    Matrix q1, q2, k1, k2, v, out, dout, dq1, dq2, dk1, dk2, dv;
    RowWeights lam, first;                // of the second map, else 0, and of the first, else 1
    float *dlam, *dfirst;                 // [B, H, T], dense
    Mask mask;
    int64_t B, H, Hn, G, T, S, D, Dv;
    int64_t causal, window;               // window 0: none
    int64_t threads;
    int64_t rows;                         // queries of a block
    int64_t parts;                        // backward: threads that share the blocks of a key/value head
    int64_t bf16;                         // 1: q, k, v, out and their gradients; 0: fp32
    float scale;                          // positive
};

// Decoding: gate * gain * RMSNorm(out), each part optional.
struct HeadOutput {
    RowWeights gate;                      // else 1
    const float *lambda_q1, *lambda_k1, *lambda_q2, *lambda_k2;  // [lambda_size], which is 0 without vectors
    int64_t lambda_size;
    const void* norm_weight;              // [Dv], or null
    int64_t norm_weight_bf16, normed;
    float eps, gain;
    float lambda_init;                    // lambda is lam + lambda_init + exp(lambda_q1 . lambda_k1) - exp(...)
};
}

namespace {

struct Range {
    int64_t t0, t1;      // queries of the block
    int64_t k0, n, ldn;  // visible keys start at k0; n of them (both multiples of NR); ldn: padded row of scores
};

Range range_of(const Problem& p, int64_t block) {
    Range r;
    r.t0 = block * p.rows, r.t1 = std::min(p.T, r.t0 + p.rows);
    const int64_t shift = p.S - p.T;
    const int64_t last = p.causal ? std::max<int64_t>(0, r.t1 + shift) : p.S;
    const int64_t first = p.causal && p.window ? std::max<int64_t>(0, r.t0 + shift - p.window + 1) : 0;
    r.k0 = first / NR * NR;
    r.n = last > first ? round_up(last - r.k0, NR) : 0;
    r.ldn = r.n + (r.n % 256 == 0 ? HALF : 0);  // rows at a power of two would map to the same cache lines
    return r;
}

int64_t padded_keys(const Problem& p) { return round_up(p.S, NR); }
int64_t longest(const Problem& p) {
    int64_t n = padded_keys(p);
    if (p.causal && p.window) n = std::min(n, round_up(p.window + p.rows + NR, NR));
    return n + HALF;
}

// Masks the scores of a query with n keys from k0 on: hidden keys get LOWEST. Returns false, without touching the scores,
// if the causal limit and the window hide all of them.
bool mask_scores(const Problem& p, int64_t k0, int64_t n, int64_t b, int64_t h, int64_t t, float* s) {
    const int64_t own = t + p.S - p.T;
    const int64_t last = std::min(std::min(p.causal ? own + 1 : p.S, p.S) - k0, n);
    const int64_t first = p.causal && p.window ? std::max<int64_t>(0, own - p.window + 1 - k0) : 0;
    if (last <= first) return false;
    if (p.mask.data) {
        const int64_t at = b * p.mask.batch + h * p.mask.head + t * p.mask.row + k0 * p.mask.key;
        if (p.mask.additive) {
            const float* mask = static_cast<const float*>(p.mask.data) + at;
            for (int64_t i = first; i < last; i++) s[i] += mask[i * p.mask.key] / p.scale;
        } else {
            const uint8_t* mask = static_cast<const uint8_t*>(p.mask.data) + at;
            for (int64_t i = first; i < last; i++) s[i] = mask[i * p.mask.key] ? s[i] : LOWEST;
        }
    }
    std::fill(s, s + first, LOWEST);
    std::fill(s + last, s + n, LOWEST);
    return true;
}

// Factor from scores to exponents of 2.
inline float log2_scale(const Problem& p) { return p.scale * 1.44269504f; }

// Replaces scores by exponentials relative to the row maximum; returns the row sum, 0 for a fully masked row.
float exponentials(const Problem& p, const Range& r, int64_t b, int64_t h, int64_t t, float* s) {
    if (!mask_scores(p, r.k0, r.n, b, h, t, s)) {
        std::fill(s, s + r.n, 0.0f);
        return 0;
    }
    const float factor = log2_scale(p);
    const float row_max = largest(s, r.n);
    if (row_max == LOWEST) {
        const float value = any_nan(s, r.n) ? NAN : 0.0f;
        std::fill(s, s + r.n, value);
        return value;
    }
    const vf scaled = broadcast(factor), offset = broadcast(-row_max * factor);
    vf totals[2] = {broadcast(0.0f), broadcast(0.0f)};
    for (int64_t i = 0; i < r.n; i += 2 * W)
        for (int j = 0; j < 2; j++) {
            const vf e = exp2(load(s + i + j * W) * scaled + offset);
            totals[j] += e;
            store(s + i + j * W, e);
        }
    return sum(totals[0] + totals[1]);
}

// 1 / total; 0 for a fully masked row. NaN stays NaN.
inline float inverse(float total) { return total > 0 ? 1 / total : total - total; }

template <typename Format>
const typename Format::Number* at(const Matrix& m, int64_t b, int64_t h, int64_t t) {
    return static_cast<const typename Format::Number*>(m.data) + b * m.batch + h * m.head + t * m.row;
}
template <typename Format>
typename Format::Number* place(const Matrix& m, int64_t b, int64_t h, int64_t t) {
    return static_cast<typename Format::Number*>(m.data) + b * m.batch + h * m.head + t * m.row;
}

// Hands out parts of the workspace in turn, aligned to cache lines.

class Workspace {
  public:
    explicit Workspace(char* start) : next(start) {}
    uint32_t* words(int64_t n) { return reinterpret_cast<uint32_t*>(take(4 * n)); }
    float* floats(int64_t n) { return reinterpret_cast<float*>(take(4 * n)); }
    char* take(int64_t bytes) {
        char* at = next;
        next += round_up(bytes, 64);
        return at;
    }
    char* next;
};

// Keys and values of one key/value head, packed for the products.
struct Packed {
    uint32_t *k1t, *k2t, *v, *vt, *k1, *k2;  // t: contraction over the width; the others over the keys

    template <typename Format>
    static Packed make(const Problem& p, Workspace& workspace, bool backward) {
        Packed x;
        x.take<Format>(p, workspace, backward);
        return x;
    }

    template <typename Format>
    void take(const Problem& p, Workspace& workspace, bool backward) {
        const int64_t S = padded_keys(p), Kw = ::words<Format>(S);
        const bool one = std::memcmp(&p.k1, &p.k2, sizeof(Matrix)) == 0;
        k1t = workspace.words(S * ::words<Format>(p.D));
        k2t = one ? k1t : workspace.words(S * ::words<Format>(p.D));
        v = vt = k1 = k2 = nullptr;
        if (!backward) {
            v = workspace.words(Kw * columns(p.Dv));
            return;
        }
        vt = workspace.words(S * ::words<Format>(p.Dv));
        k1 = workspace.words(Kw * columns(p.D));
        k2 = one ? k1 : workspace.words(Kw * columns(p.D));
    }

    template <typename Format>
    void fill(const Problem& p, int64_t b, int64_t g) const {
        const int64_t Kw = ::words<Format>(padded_keys(p));
        pack_transposed<Format>(at<Format>(p.k1, b, g, 0), p.k1.row, p.S, p.D, k1t);
        if (k2t != k1t) pack_transposed<Format>(at<Format>(p.k2, b, g, 0), p.k2.row, p.S, p.D, k2t);
        if (v) pack_columns<Format>(at<Format>(p.v, b, g, 0), p.v.row, p.S, p.Dv, Kw, v);
        if (vt) {
            pack_transposed<Format>(at<Format>(p.v, b, g, 0), p.v.row, p.S, p.Dv, vt);
            pack_columns<Format>(at<Format>(p.k1, b, g, 0), p.k1.row, p.S, p.D, Kw, k1);
            if (k2 != k1) pack_columns<Format>(at<Format>(p.k2, b, g, 0), p.k2.row, p.S, p.D, Kw, k2);
        }
    }
};

// Gradients of keys and values of one key/value head, summed in fp32: [keys][columns], with tiles [panels of NR
// keys][columns][NR].
struct KeyGradients {
    float *dk1, *dk2, *dv;
    KeyGradients(const Problem& p, Workspace& workspace) {
        const int64_t S = padded_keys(p);
        dk1 = workspace.floats(S * columns(p.D)), dk2 = workspace.floats(S * columns(p.D)), dv = workspace.floats(S * columns(p.Dv));
    }
    void clear(const Problem& p) const {
        const int64_t S = padded_keys(p);
        std::fill(dk1, dk1 + S * columns(p.D), 0.0f);
        std::fill(dk2, dk2 + S * columns(p.D), 0.0f);
        std::fill(dv, dv + S * columns(p.Dv), 0.0f);
    }
};

template <typename Format>
void write_total(const Matrix& to, int64_t b, int64_t g, int64_t keys, int64_t n, const KeyGradients* parts, int64_t count,
                 float* KeyGradients::*which, float factor) {
    constexpr bool transposed = Format::tiles;
    float line[256 + HALF];
    for (int64_t s = 0; s < keys; s++) {
        const int64_t start = transposed ? s / NR * NR * columns(n) + s % NR : s * columns(n);
        const int64_t step = transposed ? NR : 1;
        std::fill(line, line + n, 0.0f);
        for (int64_t part = 0; part < count; part++) {
            const float* total = parts[part].*which + start;
            for (int64_t j = 0; j < n; j++) line[j] += total[j * step];
        }
        auto* row = place<Format>(to, b, g, s);
        for (int64_t j = 0; j < n; j++) put(row + j, line[j] * factor);
    }
}

template <typename Format>
void write_key_gradients(const Problem& p, int64_t b, int64_t g, const KeyGradients* parts, int64_t count) {
    write_total<Format>(p.dk1, b, g, p.S, p.D, parts, count, &KeyGradients::dk1, p.scale);
    write_total<Format>(p.dk2, b, g, p.S, p.D, parts, count, &KeyGradients::dk2, p.scale);
    write_total<Format>(p.dv, b, g, p.S, p.Dv, parts, count, &KeyGradients::dv, 1.0f);
}

}  // namespace
