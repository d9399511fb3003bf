// The call as Python describes it, the keys that a block of queries can see, softmax of a row, and the workspace.
//
// Shapes: B batch, H signal heads, Hn noise heads, G key/value heads, T queries, S keys, D, Dv widths,
// m = H / Hn signal heads that share a noise head.

#pragma once

#include "products.h"

extern "C" {
struct Matrix {  // [B, heads, rows, columns]; the numbers of a row are contiguous
    void* data;
    int64_t by_batch, by_head, by_row;  // in numbers
};

struct Problem {
    Matrix q1, q2, k1, k2, v, out, dout, dq1, dq2, dk1, dk2, dv;
    float* lam;                                        // [B, H, T]
    int64_t lam_by_batch, lam_by_head, lam_by_row;
    float* dlam;                                       // the same shape, dense
    void* mask;                                        // bool or float, or null; differs between heads only if Hn == H
    int64_t mask_by_batch, mask_by_head, mask_by_row, mask_by_key;
    int64_t mask_adds;                                 // 1: floats, added to the scores
    int64_t B, H, Hn, G, T, S, D, Dv;
    int64_t causal, window;                            // window 0: none
    int64_t threads;
    int64_t rows;                                      // queries of a block
    int64_t parts;                                     // backward: threads that share the blocks of a key/value head
    float scale;                                       // positive
    float gain, eps;                                   // decoding: of the head norm below
    void* norm;                                        // decoding: its weights [Dv], or null
    int64_t norm_in_bf16, normed;                      // dtype of the weights; 1: norm each head's output
};
// A layer's lambda, exp(q1 . k1) - exp(q2 . k2) + initial: vectors of n floats, or n = 0; n < 0: that of the problem.
struct Lambda {
    float *q1, *k1, *q2, *k2;
    int64_t n;
    float initial;
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
    r.n = last > first ? up(last - r.k0, NR) : 0;
    r.ldn = r.n + (r.n % 256 == 0 ? HALF : 0);  // rows at a power of two would map to the same cache lines
    return r;
}

int64_t padded_keys(const Problem& p) { return up(p.S, NR); }
int64_t longest(const Problem& p) {
    int64_t n = padded_keys(p);
    if (p.causal && p.window) n = std::min(n, up(p.window + p.rows + NR, NR));
    return n + HALF;
}

// Masks the scores of a query with n keys from k0 on: hidden keys get LOWEST. Returns false, without touching the scores,
// if the causal limit and the window hide all of them.
bool mask_scores(const Problem& p, int64_t k0, int64_t n, int64_t b, int64_t h, int64_t t, float* s) {
    const int64_t own = t + p.S - p.T;
    const int64_t last = std::min(std::min(p.causal ? own + 1 : p.S, p.S) - k0, n);
    const int64_t first = p.causal && p.window ? std::max<int64_t>(0, own - p.window + 1 - k0) : 0;
    if (last <= first) return false;
    if (p.mask) {
        const int64_t at = b * p.mask_by_batch + h * p.mask_by_head + t * p.mask_by_row + k0 * p.mask_by_key;
        if (p.mask_adds) {
            const float* mask = static_cast<const float*>(p.mask) + at;
            for (int64_t i = first; i < last; i++) s[i] += mask[i * p.mask_by_key] / p.scale;
        } else {
            const uint8_t* mask = static_cast<const uint8_t*>(p.mask) + at;
            for (int64_t i = first; i < last; i++) s[i] = mask[i * p.mask_by_key] ? s[i] : LOWEST;
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

template <typename Form>
const typename Form::Number* at(const Matrix& m, int64_t b, int64_t h, int64_t t) {
    return static_cast<const typename Form::Number*>(m.data) + b * m.by_batch + h * m.by_head + t * m.by_row;
}
template <typename Form>
typename Form::Number* place(const Matrix& m, int64_t b, int64_t h, int64_t t) {
    return static_cast<typename Form::Number*>(m.data) + b * m.by_batch + h * m.by_head + t * m.by_row;
}

// Hands out parts of the workspace in turn, aligned to cache lines.

class Workspace {
  public:
    explicit Workspace(char* start) : next(start) {}
    uint32_t* words(int64_t n) { return reinterpret_cast<uint32_t*>(take(4 * n)); }
    float* floats(int64_t n) { return reinterpret_cast<float*>(take(4 * n)); }
    char* take(int64_t bytes) {
        char* at = next;
        next += up(bytes, 64);
        return at;
    }
    char* next;
};

// Keys and values of one key/value head, packed for the products.
struct Packed {
    uint32_t *k1t, *k2t, *v, *vt, *k1, *k2;  // t: contraction over the width; the others over the keys

    template <typename Form>
    static Packed make(const Problem& p, Workspace& workspace, bool backward) {
        Packed x;
        x.take<Form>(p, workspace, backward);
        return x;
    }

    template <typename Form>
    void take(const Problem& p, Workspace& workspace, bool backward) {
        const int64_t S = padded_keys(p), Kw = ::words<Form>(S);
        const bool one = std::memcmp(&p.k1, &p.k2, sizeof(Matrix)) == 0;
        k1t = workspace.words(S * ::words<Form>(p.D));
        k2t = one ? k1t : workspace.words(S * ::words<Form>(p.D));
        v = vt = k1 = k2 = nullptr;
        if (!backward) {
            v = workspace.words(Kw * columns(p.Dv));
            return;
        }
        vt = workspace.words(S * ::words<Form>(p.Dv));
        k1 = workspace.words(Kw * columns(p.D));
        k2 = one ? k1 : workspace.words(Kw * columns(p.D));
    }

    template <typename Form>
    void fill(const Problem& p, int64_t b, int64_t g) const {
        const int64_t Kw = ::words<Form>(padded_keys(p));
        pack_transposed<Form>(at<Form>(p.k1, b, g, 0), p.k1.by_row, p.S, p.D, k1t);
        if (k2t != k1t) pack_transposed<Form>(at<Form>(p.k2, b, g, 0), p.k2.by_row, p.S, p.D, k2t);
        if (v) pack_columns<Form>(at<Form>(p.v, b, g, 0), p.v.by_row, p.S, p.Dv, Kw, v);
        if (vt) {
            pack_transposed<Form>(at<Form>(p.v, b, g, 0), p.v.by_row, p.S, p.Dv, vt);
            pack_columns<Form>(at<Form>(p.k1, b, g, 0), p.k1.by_row, p.S, p.D, Kw, k1);
            if (k2 != k1) pack_columns<Form>(at<Form>(p.k2, b, g, 0), p.k2.by_row, p.S, p.D, Kw, k2);
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

template <typename Form>
void write_total(const Matrix& to, int64_t b, int64_t g, int64_t keys, int64_t n, const KeyGradients* parts, int64_t count,
                 float* KeyGradients::*which, float factor) {
    constexpr bool turned = Form::tiles;
    float line[256 + HALF];
    for (int64_t s = 0; s < keys; s++) {
        const int64_t start = turned ? s / NR * NR * columns(n) + s % NR : s * columns(n);
        const int64_t step = turned ? NR : 1;
        std::fill(line, line + n, 0.0f);
        for (int64_t part = 0; part < count; part++) {
            const float* total = parts[part].*which + start;
            for (int64_t j = 0; j < n; j++) line[j] += total[j * step];
        }
        auto* row = place<Form>(to, b, g, s);
        for (int64_t j = 0; j < n; j++) put(row + j, line[j] * factor);
    }
}

template <typename Form>
void write_key_gradients(const Problem& p, int64_t b, int64_t g, const KeyGradients* parts, int64_t count) {
    write_total<Form>(p.dk1, b, g, p.S, p.D, parts, count, &KeyGradients::dk1, p.scale);
    write_total<Form>(p.dk2, b, g, p.S, p.D, parts, count, &KeyGradients::dk2, p.scale);
    write_total<Form>(p.dv, b, g, p.S, p.Dv, parts, count, &KeyGradients::dv, 1.0f);
}

}  // namespace
