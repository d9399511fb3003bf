// Differential attention on CPU in blocks of queries, forward and backward, in fp32 or bf16.
//
//   P1 = softmax(q1 k1^T scale), P2 = softmax(q2 k2^T scale), out = (P1 - lam P2) v
//
// The scores of a block of R queries against all keys they can see stay in cache: both maps are normalised there,
// subtracted once in fp32, and one product with v follows. Backward recomputes the maps and needs one product dO v^T.
//
// All products run through one kernel, C += A B, on 32-bit words: a word is one float, or two bf16 numbers that lie
// side by side along the contraction. A is read by broadcasts from any strides; B lies in panels of up to 32 columns,
// [contraction][column].
//
// Letters: B batch, H signal heads, Hn noise heads, G key/value heads, T queries, S keys, D, Dv widths,
// m = H / Hn signal heads that share a noise head. Kw: words of a contraction.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

#include <omp.h>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

// ---- Vectors: W floats, through the compiler's vector extension -------------------------------------------------

#if defined(__AVX512F__)
constexpr int W = 16, MR = 8;
#elif defined(__AVX__)
constexpr int W = 8, MR = 4;
#else
constexpr int W = 4, MR = 4;
#endif
constexpr int NV = 2;            // vectors of columns that the kernel works on
constexpr int NR = 32;           // columns of a panel
constexpr int HALF = 16;         // columns of a narrow last panel
constexpr int ROWS = 8;          // rows are padded to a multiple of this, which MR divides
constexpr int DEEP = 256;        // words of a long contraction that are worked on at a time
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

typedef float vf __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * W), aligned(4), may_alias));

inline vf load(const float* p) { return *reinterpret_cast<const vf*>(p); }
inline void store(float* p, vf x) { *reinterpret_cast<vf*>(p) = x; }

inline vf broadcast(float x) {
#ifdef __AVX512F__
    return (vf)_mm512_set1_ps(x);
#else
    vf v;
    for (int i = 0; i < W; i++) v[i] = x;
    return v;
#endif
}

inline float sum(vf x) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#endif
    float total = 0;
    for (int i = 0; i < W; i++) total += x[i];
    return total;
}

inline float largest(vf x) {
    float top = x[0];
    for (int i = 1; i < W; i++) top = std::max(top, x[i]);
    return top;
}

inline vf maximum(vf a, vf b) { return a > b ? a : b; }

// 2^x for x <= 0, error below 2e-7 of the value; 0 where x < -126.
inline vf exp2(vf x) {
    // Chebyshev interpolation of 2^f on [-1/2, 1/2].
    const float c[6] = {0.99999999f, 0.69314692f, 0.24022669f, 0.05550733f, 0.00967141f, 0.00132673f};
#ifdef __AVX512F__
    __m512 y = (__m512)x;
    __m512 whole = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vf f = x - (vf)whole;
#else
    x = x < broadcast(-200.0f) ? broadcast(-200.0f) : x;
    vf magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    vf whole = (x + magic) - magic;
    vf f = x - whole;
#endif
    vf p = broadcast(c[5]);
    for (int i = 4; i >= 0; i--) p = p * f + broadcast(c[i]);
#ifdef __AVX512F__
    return (vf)_mm512_scalef_ps((__m512)p, whole);
#else
    vi bits = (__builtin_convertvector(whole, vi) + 127) << 23;
    vf power;
    std::memcpy(&power, &bits, sizeof(power));
    return whole < broadcast(-126.0f) ? broadcast(0.0f) : p * power;
#endif
}

// ---- Numbers in memory -----------------------------------------------------------------------------------------

struct bf16 {
    uint16_t bits;
};

inline vf load_wide(const float* p) { return load(p); }
inline vf load_wide(const bf16* p) {
#ifdef __AVX512F__
    __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return (vf)_mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
#else
    vi words;
    for (int i = 0; i < W; i++) words[i] = int32_t(p[i].bits) << 16;
    vf x;
    std::memcpy(&x, &words, sizeof(x));
    return x;
#endif
}
template <typename In>
inline vf load_first(const In* p, int64_t n) {  // the first n numbers, zeros behind
    if (n >= W) return load_wide(p);
    In some[W] = {};
    std::copy(p, p + n, some);
    return load_wide(some);
}

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
    uint32_t word = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &word, 4);
    return y;
}

inline uint16_t narrow_bits(float x) {  // to the nearest, ties to even
    uint32_t word;
    std::memcpy(&word, &x, 4);
    if ((word & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (word + 0x7fff + ((word >> 16) & 1)) >> 16;
}
inline void put(float* p, float x) { *p = x; }
inline void put(bf16* p, float x) { p->bits = narrow_bits(x); }

inline uint32_t word_of(float x) {
    uint32_t word;
    std::memcpy(&word, &x, 4);
    return word;
}
inline uint32_t word_of(bf16 low, bf16 high) { return uint32_t(low.bits) | uint32_t(high.bits) << 16; }

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
constexpr bool HAS_BF16_PRODUCTS = true;
#else
constexpr bool HAS_BF16_PRODUCTS = false;
#endif

// What the products are computed from: float words, or words of two bf16 numbers (where the processor multiplies them).
template <typename In>
struct Words {
    static constexpr bool pairs = false;
};
template <>
struct Words<bf16> {
    static constexpr bool pairs = HAS_BF16_PRODUCTS;
};

inline int64_t up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
template <typename In>
inline int64_t words(int64_t n) { return Words<In>::pairs ? (n + 1) / 2 : n; }
inline int64_t columns(int64_t n) { return up(n, HALF); }
inline int width(int64_t n, int64_t column) { return n - column > HALF ? NR : HALF; }  // of the panel at this column

// ---- The product ------------------------------------------------------------------------------------------------

template <bool pairs>
inline vf multiply_add(vf c, uint32_t a, const uint32_t* b) {
    if constexpr (pairs) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
        return (vf)_mm512_dpbf16_ps((__m512)c, (__m512bh)_mm512_set1_epi32(a), (__m512bh)_mm512_loadu_si512(b));
#else
        return c;
#endif
    } else {
        float x;
        std::memcpy(&x, &a, 4);
        return c + broadcast(x) * load(reinterpret_cast<const float*>(b));
    }
}

// C[MR][nv * W] (+)= A B: A(i, k) = a[i * by_row + k * by_k], B(k, j) = b[k * ldb + j].
template <bool pairs, int nv>
inline void tile(int64_t Kw, const uint32_t* a, int64_t by_row, int64_t by_k, const uint32_t* b, int ldb, float* c,
                 int64_t ldc, bool add) {
    vf total[MR][nv];
    for (int i = 0; i < MR; i++)
        for (int j = 0; j < nv; j++) total[i][j] = add ? load(c + i * ldc + j * W) : broadcast(0.0f);
    for (int64_t k = 0; k < Kw; k++, a += by_k, b += ldb)
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++)
#pragma GCC unroll 2
            for (int j = 0; j < nv; j++) total[i][j] = multiply_add<pairs>(total[i][j], a[i * by_row], b + j * W);
    for (int i = 0; i < MR; i++)
        for (int j = 0; j < nv; j++) store(c + i * ldc + j * W, total[i][j]);
}

// The same for a whole panel of 32 or 16 columns.
template <bool pairs>
inline void panel(int64_t Kw, const uint32_t* a, int64_t by_row, int64_t by_k, const uint32_t* b, int n, float* c,
                  int64_t ldc, bool add) {
    int j = 0;
    for (; j + NV * W <= n; j += NV * W) tile<pairs, NV>(Kw, a, by_row, by_k, b + j, n, c + j, ldc, add);
    for (; j < n; j += W) tile<pairs, 1>(Kw, a, by_row, by_k, b + j, n, c + j, ldc, add);
}

// C[rows][n keys] = A[rows][Kw] B, a short contraction: B in panels of NR columns, each Kw * NR words.
template <bool pairs>
void short_product(int64_t rows, int64_t n, int64_t Kw, const uint32_t* a, int64_t lda, const uint32_t* b, float* c,
                   int64_t ldc) {
    for (int64_t j = 0; j < n; j += NR, b += Kw * NR)
        for (int64_t i = 0; i < rows; i += MR) panel<pairs>(Kw, a + i * lda, lda, 1, b, NR, c + i * ldc + j, ldc, false);
}

// C[rows][n] = A[rows][Kw] B, a long contraction; B in panels at b + column * Kb, from word k0 of Kb.
template <bool pairs>
void long_product(int64_t rows, int64_t n, int64_t Kw, const uint32_t* a, int64_t lda, const uint32_t* b, int64_t Kb,
                  int64_t k0, float* c, int64_t ldc) {
    for (int64_t j = 0; j < columns(n); j += NR) {
        const int wide = width(n, j);
        for (int64_t k = 0; k < Kw; k += DEEP)
            for (int64_t i = 0; i < rows; i += MR)
                panel<pairs>(std::min<int64_t>(DEEP, Kw - k), a + i * lda + k, lda, 1, b + j * Kb + (k0 + k) * wide,
                             wide, c + i * ldc + j, ldc, k > 0);
    }
}

// C[keys][n] += A^T B over rows: A(key, row word) = a[key + word * lda]; B in panels at b + column * Kw.
template <bool pairs>
void outer_product(int64_t keys, int64_t n, int64_t Kw, const uint32_t* a, int64_t lda, const uint32_t* b, float* c,
                   int64_t ldc) {
    for (int64_t i = 0; i < keys; i += MR)
        for (int64_t j = 0; j < columns(n); j += NR)
            panel<pairs>(Kw, a + i, 1, lda, b + j * Kw, width(n, j), c + i * ldc + j, ldc, true);
}

// ---- Packing ----------------------------------------------------------------------------------------------------

// One row of n numbers as words.
template <typename In>
inline void words_of_row(const In* x, int64_t n, uint32_t* to) {
    if constexpr (!Words<In>::pairs)
        for (int64_t i = 0; i < n; i++) to[i] = word_of(widen(x[i]));
    else {
        std::memcpy(to, x, 2 * (n / 2 * 2));
        if (n % 2) to[n / 2] = x[n - 1].bits;
    }
}

// Rows as the A of a product: [padded rows][words of n], zeros below.
template <typename In>
void pack_rows(const In* x, int64_t stride, int64_t rows, int64_t n, uint32_t* to) {
    const int64_t Kw = words<In>(n);
    for (int64_t i = 0; i < rows; i++) words_of_row(x + i * stride, n, to + i * Kw);
    std::memset(to + rows * Kw, 0, 4 * Kw * (up(rows, ROWS) - rows));
}

// Rows as columns of B, contracted over their width: panels of NR rows, [words of n][NR].
template <typename In>
void pack_transposed(const In* x, int64_t stride, int64_t rows, int64_t n, uint32_t* to) {
    const int64_t Kw = words<In>(n);
    uint32_t line[NR][256];
    for (int64_t first = 0; first < rows; first += NR, to += Kw * NR) {
        const int64_t here = std::min<int64_t>(NR, rows - first);
        for (int64_t i = 0; i < here; i++) words_of_row(x + (first + i) * stride, n, line[i]);
        for (int64_t i = here; i < NR; i++) std::memset(line[i], 0, 4 * Kw);
        for (int64_t k = 0; k < Kw; k++)
            for (int64_t i = 0; i < NR; i++) to[k * NR + i] = line[i][k];
    }
}

// Rows as B, contracted over the rows: panels of columns, [Kw words of rows][columns of the panel], zeros below.
template <typename In>
void pack_columns(const In* x, int64_t stride, int64_t rows, int64_t n, int64_t Kw, uint32_t* to) {
    constexpr int step = Words<In>::pairs ? 2 : 1;
    for (int64_t j = 0; j < columns(n); j += NR) {
        const int wide = width(n, j);
        const int64_t filled = std::min<int64_t>(wide, n - j);
        for (int64_t k = 0; k < Kw; k++, to += wide) {
            const In* row = x + k * step * stride + j;
            int64_t i = 0;
            if (k * step < rows) {
                if constexpr (!Words<In>::pairs)
                    for (; i < filled; i++) to[i] = word_of(widen(row[i]));
                else if (2 * k + 1 < rows)
                    for (; i < filled; i++) to[i] = word_of(row[i], row[i + stride]);
                else
                    for (; i < filled; i++) to[i] = row[i].bits;
            }
            for (; i < wide; i++) to[i] = 0;
        }
    }
}

// W floats as words of one row of A: floats as they are, or rounded to bf16 and put side by side.
template <bool pairs>
inline void put_words(uint32_t* to, int64_t at, vf x) {
    if constexpr (pairs) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + at / 2), (__m256i)_mm512_cvtneps_pbh((__m512)x));
#endif
    } else
        store(reinterpret_cast<float*>(to) + at, x);
}

// W floats of two rows that lie below one another, as words of the transposed A.
inline void put_two_rows(uint32_t* to, vf upper, vf lower) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)upper));
    __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)lower));
    _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
#endif
}

}  // namespace

// ---- The problem -------------------------------------------------------------------------------------------------

extern "C" {
struct Matrix {  // [B, heads, rows, columns], numbers of a row side by side
    void* data;
    int64_t by_batch, by_head, by_row;  // in numbers
};

struct Problem {
    Matrix q1, q2, k1, k2, v, out, dout, dq1, dq2, dk1, dk2, dv;
    float* lam;                                        // [B, H, T]
    int64_t lam_by_batch, lam_by_head, lam_by_row;
    float* dlam;                                       // the same shape, dense
    void* mask;                                        // bool or float, or null; of single heads only where Hn == H
    int64_t mask_by_batch, mask_by_head, mask_by_row, mask_by_key;
    int64_t mask_adds;                                 // 1: floats that are added
    int64_t B, H, Hn, G, T, S, D, Dv;
    int64_t causal, window;                            // window 0: none
    int64_t threads;
    int64_t rows;                                      // queries of a block
    int64_t parts;                                     // backward: blocks of a key/value head are dealt to so many
    float scale;                                       // positive
    float gain, eps;                                   // decoding: of the head norm below
    void* norm;                                        // decoding: its weights [Dv], or null
    int64_t norm_in_bf16, normed;                      // dtype of the weights; 1: norm each head's output
};
// A layer's lambda, exp(q1 . k1) - exp(q2 . k2) + initial: vectors of n floats, or n = 0.
struct Lambda {
    float *q1, *k1, *q2, *k2;
    int64_t n;
    float initial;
};
}

namespace {

struct Range {
    int64_t t0, t1;      // queries of the block
    int64_t k0, n, ldn;  // keys it can see start at k0, a multiple of NR; n of them, a multiple of NR; padded
};

Range range_of(const Problem& p, int64_t block) {
    Range r;
    r.t0 = block * p.rows, r.t1 = std::min(p.T, r.t0 + p.rows);
    const int64_t shift = p.S - p.T;
    const int64_t last = p.causal ? std::max<int64_t>(0, r.t1 + shift) : p.S;
    const int64_t first = p.causal && p.window ? std::max<int64_t>(0, r.t0 + shift - p.window + 1) : 0;
    r.k0 = first / NR * NR;
    r.n = last > first ? up(last - r.k0, NR) : 0;
    r.ldn = r.n + (r.n % 256 == 0 ? HALF : 0);  // rows a power of two apart would share the lines of the cache
    return r;
}

int64_t padded_keys(const Problem& p) { return up(p.S, NR); }
int64_t longest(const Problem& p) {
    int64_t n = padded_keys(p);
    if (p.causal && p.window) n = std::min(n, up(p.window + p.rows + NR, NR));
    return n + HALF;
}

// Scores to exponentials in place; returns their sum, 0 for a row that sees nothing.
float soften(const Problem& p, const Range& r, int64_t b, int64_t h, int64_t t, float* s) {
    const int64_t own = t + p.S - p.T;
    const int64_t last = std::min(p.causal ? own + 1 : p.S, p.S) - r.k0;
    const int64_t first = p.causal && p.window ? std::max<int64_t>(0, own - p.window + 1 - r.k0) : 0;
    if (last <= first) {
        std::fill(s, s + r.n, 0.0f);
        return 0;
    }
    if (p.mask) {
        const int64_t at = b * p.mask_by_batch + h * p.mask_by_head + t * p.mask_by_row + r.k0 * p.mask_by_key;
        if (p.mask_adds) {
            const float* mask = static_cast<const float*>(p.mask) + at;
            for (int64_t i = first; i < last; i++) s[i] += mask[i * p.mask_by_key] / p.scale;
        } else {
            const uint8_t* mask = static_cast<const uint8_t*>(p.mask) + at;
            for (int64_t i = first; i < last; i++) s[i] = mask[i * p.mask_by_key] ? s[i] : LOWEST;
        }
    }
    std::fill(s, s + first, LOWEST);
    std::fill(s + last, s + r.n, LOWEST);
    const float factor = p.scale * 1.44269504f;
    vf tops[2] = {load(s), load(s + W)};
    for (int64_t i = 2 * W; i < r.n; i += 2 * W) {
        tops[0] = maximum(load(s + i), tops[0]);
        tops[1] = maximum(load(s + i + W), tops[1]);
    }
    const float top = largest(maximum(tops[0], tops[1]));
    if (top == LOWEST) {  // a comparison with NaN is false, so that NaN may hide here
        const float nothing = std::any_of(s, s + r.n, [](float x) { return x != x; }) ? NAN : 0.0f;
        std::fill(s, s + r.n, nothing);
        return nothing;
    }
    const vf scaled = broadcast(factor), offset = broadcast(-top * factor);
    vf totals[2] = {broadcast(0.0f), broadcast(0.0f)};
    for (int64_t i = 0; i < r.n; i += 2 * W)
        for (int j = 0; j < 2; j++) {
            const vf e = exp2(load(s + i + j * W) * scaled + offset);
            totals[j] += e;
            store(s + i + j * W, e);
        }
    return sum(totals[0] + totals[1]);
}

// 1 / total; 0 for a row that sees nothing, and NaN stays NaN.
inline float inverse(float total) { return total > 0 ? 1 / total : total - total; }

// e1 c1 - lam e2 c2, as words in the place of e1. Maps that cancel cancel exactly.
template <bool pairs>
inline void subtract(int64_t n, float* e1, const float* e2, float c1, float c2, float lam) {
    const vf v1 = broadcast(c1), v2 = broadcast(c2), minus_lam = broadcast(-lam);
    for (int64_t i = 0; i < n; i += W) {
        const vf p1 = load(e1 + i) * v1, p2 = load(e2 + i) * v2;
        put_words<pairs>(reinterpret_cast<uint32_t*>(e1), i, p1 + minus_lam * p2);
    }
}

template <typename In>
const In* at(const Matrix& m, int64_t b, int64_t h, int64_t t) {
    return static_cast<const In*>(m.data) + b * m.by_batch + h * m.by_head + t * m.by_row;
}
template <typename In>
In* place(const Matrix& m, int64_t b, int64_t h, int64_t t) {
    return static_cast<In*>(m.data) + b * m.by_batch + h * m.by_head + t * m.by_row;
}

// ---- Room: each part of it is cut off in turn, at lines of the cache ------------------------------------------------

class Room {
  public:
    explicit Room(char* start) : next(start) {}
    uint32_t* words(int64_t n) { return reinterpret_cast<uint32_t*>(take(4 * n)); }
    float* floats(int64_t n) { return reinterpret_cast<float*>(take(4 * n)); }
    char* take(int64_t bytes) {
        char* at = next;
        next += up(bytes, 64);
        return at;
    }
    char* next;
};

// Keys and values of a key/value head, packed for the products.
struct Packed {
    uint32_t *k1t, *k2t, *v, *vt, *k1, *k2;  // t: contracted over the width; the others over the keys

    template <typename In>
    static Packed make(const Problem& p, Room& room, bool backward) {
        Packed x;
        x.take<In>(p, room, backward);
        return x;
    }

    template <typename In>
    void take(const Problem& p, Room& room, bool backward) {
        const int64_t S = padded_keys(p), Kw = ::words<In>(S);
        const bool one = std::memcmp(&p.k1, &p.k2, sizeof(Matrix)) == 0;
        k1t = room.words(S * ::words<In>(p.D));
        k2t = one ? k1t : room.words(S * ::words<In>(p.D));
        v = vt = k1 = k2 = nullptr;
        if (!backward) {
            v = room.words(Kw * columns(p.Dv));
            return;
        }
        vt = room.words(S * ::words<In>(p.Dv));
        k1 = room.words(Kw * columns(p.D));
        k2 = one ? k1 : room.words(Kw * columns(p.D));
    }

    template <typename In>
    void fill(const Problem& p, int64_t b, int64_t g) const {
        const int64_t Kw = ::words<In>(padded_keys(p));
        pack_transposed(at<In>(p.k1, b, g, 0), p.k1.by_row, p.S, p.D, k1t);
        if (k2t != k1t) pack_transposed(at<In>(p.k2, b, g, 0), p.k2.by_row, p.S, p.D, k2t);
        if (v) pack_columns(at<In>(p.v, b, g, 0), p.v.by_row, p.S, p.Dv, Kw, v);
        if (vt) {
            pack_transposed(at<In>(p.v, b, g, 0), p.v.by_row, p.S, p.Dv, vt);
            pack_columns(at<In>(p.k1, b, g, 0), p.k1.by_row, p.S, p.D, Kw, k1);
            if (k2 != k1) pack_columns(at<In>(p.k2, b, g, 0), p.k2.by_row, p.S, p.D, Kw, k2);
        }
    }
};
// ---- Forward -----------------------------------------------------------------------------------------------------

template <typename In>
struct Forward {
    static constexpr bool pairs = Words<In>::pairs;
    const Problem& p;
    int64_t padded;
    uint32_t* q;
    float *s1, *s2, *rows_out;
    float sum1[256], sum2[256];

    Forward(const Problem& problem, Room& room) : p(problem), padded(up(problem.rows, ROWS)) {
        q = room.words(padded * words<In>(p.D));
        s1 = room.floats(padded * longest(p));
        s2 = room.floats(padded * longest(p));
        rows_out = room.floats(padded * columns(p.Dv));
    }

    // Exponentials of the scores of a block and their sums.
    void map(const Range& r, const Matrix& queries, const uint32_t* kt, int64_t b, int64_t h, float* s, float* sums) {
        const int64_t Kw = words<In>(p.D), rows = r.t1 - r.t0;
        pack_rows(at<In>(queries, b, h, r.t0), queries.by_row, rows, p.D, q);
        short_product<pairs>(up(rows, ROWS), r.n, Kw, q, Kw, kt + r.k0 * Kw, s, r.ldn);
        for (int64_t i = 0; i < rows; i++) sums[i] = soften(p, r, b, h, r.t0 + i, s + i * r.ldn);
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
                long_product<pairs>(up(rows, ROWS), p.Dv, pairs ? r.n / 2 : r.n, reinterpret_cast<uint32_t*>(s1), r.ldn,
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

// ---- Backward ----------------------------------------------------------------------------------------------------

// Gradients of keys and values of one key/value head, summed in fp32.
struct Totals {
    float *dk1, *dk2, *dv;
    Totals(const Problem& p, Room& room) {
        const int64_t S = padded_keys(p);
        dk1 = room.floats(S * columns(p.D)), dk2 = room.floats(S * columns(p.D)), dv = room.floats(S * columns(p.Dv));
    }
    void clear(const Problem& p) const {
        const int64_t S = padded_keys(p);
        std::fill(dk1, dk1 + S * columns(p.D), 0.0f);
        std::fill(dk2, dk2 + S * columns(p.D), 0.0f);
        std::fill(dv, dv + S * columns(p.Dv), 0.0f);
    }
};

template <typename In>
void write_total(const Matrix& to, int64_t b, int64_t g, int64_t keys, int64_t n, const Totals* parts, int64_t count,
                 float* Totals::*which, float factor) {
    for (int64_t s = 0; s < keys; s++) {
        In* row = place<In>(to, b, g, s);
        for (int64_t j = 0; j < n; j++) {
            float total = 0;
            for (int64_t part = 0; part < count; part++) total += (parts[part].*which)[s * columns(n) + j];
            put(row + j, total * factor);
        }
    }
}

template <typename In>
void write_totals(const Problem& p, int64_t b, int64_t g, const Totals* parts, int64_t count) {
    write_total<In>(p.dk1, b, g, p.S, p.D, parts, count, &Totals::dk1, p.scale);
    write_total<In>(p.dk2, b, g, p.S, p.D, parts, count, &Totals::dk2, p.scale);
    write_total<In>(p.dv, b, g, p.S, p.Dv, parts, count, &Totals::dv, 1.0f);
}

template <typename In>
struct Backward {
    static constexpr bool pairs = Words<In>::pairs;
    Forward<In> forward;
    const Problem& p;
    uint32_t *q2, *q1_columns, *q2_columns, *dout, *dout_columns, *difference, *turned;
    float *s1, *s2, *dp, *dp2, *dq;

    Backward(const Problem& problem, Room& room) : forward(problem, room), p(problem) {
        const int64_t padded = forward.padded, n = padded * longest(p), Kw = words<In>(padded);
        q1_columns = room.words(Kw * columns(p.D));
        q2_columns = room.words(Kw * columns(p.D));
        dout = room.words(padded * words<In>(p.Dv));
        dout_columns = room.words(Kw * columns(p.Dv));
        difference = room.words(pairs ? n / 2 : n);
        turned = room.words(pairs ? n / 2 : 0);
        dp = room.floats(n);
        dp2 = room.floats(n);
        dq = room.floats(padded * columns(p.D));
        s1 = forward.s1, s2 = forward.s2;
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
        for (int64_t i = rows; i < up(rows, ROWS); i++) std::fill(s + i * r.ldn, s + i * r.ldn + r.n, 0.0f);
        pack_columns(at<In>(queries, b, h, r.t0), queries.by_row, rows, p.D, words<In>(up(rows, ROWS)), as_columns);
    }

    void block(const Packed& keys, const Totals& totals, int64_t b, int64_t g, int64_t index) {
        const Range r = range_of(p, index);
        if (r.n == 0) return;  // the gradients of these queries stay 0
        const int64_t rows = r.t1 - r.t0, padded = up(rows, ROWS), m = p.H / p.Hn, noise = p.Hn / p.G;
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

    // P1 - lam P2 into `difference`, dS1 in the place of P1, the share of this head in dP2 (with one head: dS2), dlam.
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

    // dS2 as words, in the place of dP2 (with one signal head, of dS2 in floats).
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

    // dQ = dS K scale, written; dK += dS^T Q, scaled at the end.
    void through(const Range& r, const Matrix& to, int64_t b, int64_t h, const float* ds, const uint32_t* k,
                 const uint32_t* q_columns, float* dk) {
        const int64_t rows = r.t1 - r.t0, padded = up(rows, ROWS), wide = columns(p.D);
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

// ---- Decoding ----------------------------------------------------------------------------------------------------

// A few queries, each key and value read once and nothing packed: what cached decoding needs. The heads that share a
// key/value head go together, at most MOST rows of either map.
constexpr int MOST = 8;

template <typename In>
struct Decode {
    const Problem& p;
    Range r;
    int64_t rows1, rows2, wide;  // rows of the maps of a key/value head; D padded to vectors
    float *q, *s1, *s2, *total;

    Decode(const Problem& problem, Room& room) : p(problem) {
        r = range_of(p, 0);
        rows1 = p.H / p.G * p.T, rows2 = p.Hn / p.G * p.T, wide = up(p.D, W);
        q = room.floats(MOST * wide);
        s1 = room.floats(MOST * (r.ldn + NR));
        s2 = room.floats(MOST * (r.ldn + NR));
        total = room.floats(MOST * up(p.Dv, W));
    }

    template <int rows>
    void scores(const In* k, int64_t by_row, int64_t keys, float* s) const {
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
    void values(const In* v, int64_t by_row, int64_t keys, const float* weights) const {
        for (int64_t d = 0; d < p.Dv; d += W) {  // a strip of columns at a time, its sums in registers
            vf sums[rows];
            for (int j = 0; j < rows; j++) sums[j] = load(total + j * up(p.Dv, W) + d);
            const In* x = v + d;
            if (p.Dv - d >= W)
                for (int64_t i = 0; i < keys; i++, x += by_row)
                    for (int j = 0; j < rows; j++) sums[j] += broadcast(weights[j * r.ldn + i]) * load_wide(x);
            else
                for (int64_t i = 0; i < keys; i++, x += by_row)
                    for (int j = 0; j < rows; j++)
                        sums[j] += broadcast(weights[j * r.ldn + i]) * load_first(x, p.Dv - d);
            for (int j = 0; j < rows; j++) store(total + j * up(p.Dv, W) + d, sums[j]);
        }
    }

    template <int rows>
    void some_scores(int64_t n, const In* k, int64_t by_row, int64_t keys, float* s) const {
        if constexpr (rows < MOST)
            if (n > rows) return some_scores<rows + 1>(n, k, by_row, keys, s);
        scores<rows>(k, by_row, keys, s);
    }
    template <int rows>
    void some_values(int64_t n, const In* v, int64_t by_row, int64_t keys, const float* weights) const {
        if constexpr (rows < MOST)
            if (n > rows) return some_values<rows + 1>(n, v, by_row, keys, weights);
        values<rows>(v, by_row, keys, weights);
    }

    void map(const Matrix& queries, const Matrix& keys, int64_t rows, int64_t b, int64_t g, float* s, float* sums) {
        const int64_t heads = rows / p.T, seen = std::min(p.S - r.k0, r.n);
        for (int64_t j = 0; j < rows; j++) {
            const In* x = at<In>(queries, b, g * heads + j / p.T, j % p.T);
            for (int64_t d = 0; d < wide; d++) q[j * wide + d] = d < p.D ? widen(x[d]) : 0.0f;
        }
        some_scores<1>(rows, at<In>(keys, b, g, r.k0), keys.by_row, seen, s);
        for (int64_t j = 0; j < rows; j++) sums[j] = soften(p, r, b, g * heads + j / p.T, j % p.T, s + j * r.ldn);
    }

    void head(int64_t b, int64_t g) {
        float sum1[MOST], sum2[MOST];
        const int64_t seen = std::min(p.S - r.k0, r.n), m = p.H / p.Hn, heads = p.H / p.G, padded = up(p.Dv, W);
        std::fill(total, total + MOST * padded, 0.0f);
        if (r.n) {
            map(p.q2, p.k2, rows2, b, g, s2, sum2);
            map(p.q1, p.k1, rows1, b, g, s1, sum1);
            for (int64_t j = 0; j < rows1; j++) {
                const int64_t h = g * heads + j / p.T, t = j % p.T, j2 = j / p.T / m * p.T + t;
                const float lam = p.lam[b * p.lam_by_batch + h * p.lam_by_head + t * p.lam_by_row];
                subtract<false>(r.n, s1 + j * r.ldn, s2 + j2 * r.ldn, inverse(sum1[j]), inverse(sum2[j2]), lam);
            }
            const In* v = at<In>(p.v, b, g, r.k0);
            for (int64_t i = 0; i < seen; i += DEEP)  // so that a strip of values stays in cache
                some_values<1>(rows1, v + i * p.v.by_row, p.v.by_row, std::min<int64_t>(DEEP, seen - i), s1 + i);
        }
        for (int64_t j = 0; j < rows1; j++) {
            In* to = place<In>(p.out, b, g * heads + j / p.T, j % p.T);
            if (p.normed) norm(total + j * padded);
            for (int64_t d = 0; d < p.Dv; d++) put(to + d, p.gain * total[j * padded + d]);
        }
    }

    // x / rms(x) * weights, of a head's output.
    void norm(float* x) const {
        float squares = 0;
        for (int64_t d = 0; d < p.Dv; d++) squares += x[d] * x[d];
        const float by = 1 / std::sqrt(squares / p.Dv + p.eps);
        for (int64_t d = 0; d < p.Dv; d++) {
            const float w = !p.norm           ? 1.0f
                            : p.norm_in_bf16 ? widen(static_cast<const bf16*>(p.norm)[d])
                                             : static_cast<const float*>(p.norm)[d];
            x[d] *= by * w;
        }
    }
};

template <typename In>
int64_t decode_bytes(const Problem& p) {
    Room room(nullptr);
    Decode<In>(p, room);
    return reinterpret_cast<intptr_t>(room.next);
}

template <typename In>
void decode(const Problem& p, char* start) {
    const int64_t bytes = decode_bytes<In>(p);
#pragma omp parallel for schedule(dynamic, 1) num_threads(p.threads) if (p.threads > 1)
    for (int64_t head = 0; head < p.B * p.G; head++) {
        Room room(start + bytes * omp_get_thread_num());
        Decode<In>(p, room).head(head / p.G, head % p.G);
    }
}

// ---- Sharing the work out ---------------------------------------------------------------------------------------

int64_t blocks_of(const Problem& p) { return (p.T + p.rows - 1) / p.rows; }

// With many key/value heads each thread packs those it works on; with few they are packed once for all threads.
bool heads_fill_threads(const Problem& p) {
    const int64_t heads = p.B * p.G;
    return p.threads == 1 || heads >= 4 * p.threads || heads % p.threads == 0;
}

template <typename In>
struct Shares {
    int64_t packed, work, totals;  // bytes of one of each
    int64_t copies, sums, threads;  // how many of the first, of the last and of the second
    bool own;
    char* start;

    Shares(const Problem& p, bool backward, char* room = nullptr) : threads(p.threads), start(room) {
        Room a(nullptr), b(nullptr), c(nullptr);
        Packed::make<In>(p, a, backward);
        if (backward)
            Backward<In>(p, b), Totals(p, c);
        else
            Forward<In>(p, b);
        packed = size(a), work = size(b), totals = size(c);
        own = heads_fill_threads(p);
        copies = own ? p.threads : p.B * p.G;
        sums = own ? p.threads : p.B * p.G * p.parts;
    }
    static int64_t size(const Room& room) { return reinterpret_cast<intptr_t>(room.next); }
    int64_t bytes() const { return packed * copies + work * threads + totals * sums; }
    char* packed_at(int64_t i) const { return start + packed * i; }
    char* work_at(int64_t i) const { return start + packed * copies + work * i; }
    char* totals_at(int64_t i) const { return start + packed * copies + work * threads + totals * i; }
};

template <typename In>
void forward(const Problem& p, char* start) {
    const Shares<In> shares(p, false, start);
    const int64_t heads = p.B * p.G, blocks = blocks_of(p);
#pragma omp parallel num_threads(p.threads)
    {
        const int64_t thread = omp_get_thread_num();
        Room room(shares.work_at(thread));
        Forward<In> work(p, room);
        if (shares.own) {
            Room own(shares.packed_at(thread));
            const Packed keys = Packed::make<In>(p, own, false);
#pragma omp for schedule(dynamic, 1)
            for (int64_t head = 0; head < heads; head++) {
                keys.fill<In>(p, head / p.G, head % p.G);
                for (int64_t block = 0; block < blocks; block++) work.block(keys, head / p.G, head % p.G, block);
            }
        } else {
#pragma omp for schedule(dynamic, 1)
            for (int64_t head = 0; head < heads; head++) {
                Room one(shares.packed_at(head));
                Packed::make<In>(p, one, false).template fill<In>(p, head / p.G, head % p.G);
            }
#pragma omp for schedule(dynamic, 1)
            for (int64_t item = 0; item < heads * blocks; item++) {  // the longest first
                const int64_t head = item % heads, block = blocks - 1 - item / heads;
                Room one(shares.packed_at(head));
                work.block(Packed::make<In>(p, one, false), head / p.G, head % p.G, block);
            }
        }
    }
}

template <typename In>
void backward(const Problem& p, char* start) {
    const Shares<In> shares(p, true, start);
    const int64_t heads = p.B * p.G, blocks = blocks_of(p);
#pragma omp parallel num_threads(p.threads)
    {
        const int64_t thread = omp_get_thread_num();
        Room room(shares.work_at(thread));
        Backward<In> work(p, room);
        if (shares.own) {
            Room own(shares.packed_at(thread)), sums(shares.totals_at(thread));
            const Packed keys = Packed::make<In>(p, own, true);
            const Totals totals(p, sums);
#pragma omp for schedule(dynamic, 1)
            for (int64_t head = 0; head < heads; head++) {
                const int64_t b = head / p.G, g = head % p.G;
                keys.fill<In>(p, b, g);
                totals.clear(p);
                for (int64_t block = 0; block < blocks; block++) work.block(keys, totals, b, g, block);
                write_totals<In>(p, b, g, &totals, 1);
            }
        } else {
#pragma omp for schedule(dynamic, 1)
            for (int64_t head = 0; head < heads; head++) {
                Room one(shares.packed_at(head));
                Packed::make<In>(p, one, true).template fill<In>(p, head / p.G, head % p.G);
            }
#pragma omp for schedule(dynamic, 1)
            for (int64_t item = 0; item < heads * p.parts; item++) {
                const int64_t head = item / p.parts;
                Room one(shares.packed_at(head)), sums(shares.totals_at(item));
                const Packed keys = Packed::make<In>(p, one, true);
                const Totals totals(p, sums);
                totals.clear(p);
                for (int64_t block = item % p.parts; block < blocks; block += p.parts)
                    work.block(keys, totals, head / p.G, head % p.G, block);
            }
#pragma omp for schedule(dynamic, 1)
            for (int64_t head = 0; head < heads; head++) {
                Totals* parts = static_cast<Totals*>(__builtin_alloca(sizeof(Totals) * p.parts));
                for (int64_t part = 0; part < p.parts; part++) {
                    Room sums(shares.totals_at(head * p.parts + part));
                    new (parts + part) Totals(p, sums);
                }
                write_totals<In>(p, head / p.G, head % p.G, parts, p.parts);
            }
        }
    }
}

}  // namespace

extern "C" {
int64_t diff_attention_decode_room(const Problem* p, bool in_bf16) {
    return (in_bf16 ? decode_bytes<bf16>(*p) : decode_bytes<float>(*p)) * p->threads;
}
void diff_attention_decode(const Problem* p, bool in_bf16, char* room) {
    in_bf16 ? decode<bf16>(*p, room) : decode<float>(*p, room);
}
// Decoding of a whole layer between projections: lambda, attention, head norm and gain.
void diff_attention_decode_layer(const Problem* problem, const Lambda* lambda, bool in_bf16) {
    float first = 0, second = 0;
    for (int64_t i = 0; i < lambda->n; i++)
        first += lambda->q1[i] * lambda->k1[i], second += lambda->q2[i] * lambda->k2[i];
    float lam = std::exp(first) - std::exp(second) + lambda->initial;
    Problem p = *problem;
    p.lam = &lam, p.lam_by_batch = p.lam_by_head = p.lam_by_row = 0;
    const int64_t bytes = diff_attention_decode_room(&p, in_bf16);
    char* room = static_cast<char*>(std::aligned_alloc(64, up(bytes, 64)));
    if (!room) throw std::bad_alloc();
    diff_attention_decode(&p, in_bf16, room);
    std::free(room);
}
int64_t diff_attention_forward_room(const Problem* p, bool in_bf16) {
    return in_bf16 ? Shares<bf16>(*p, false).bytes() : Shares<float>(*p, false).bytes();
}
int64_t diff_attention_backward_room(const Problem* p, bool in_bf16) {
    return in_bf16 ? Shares<bf16>(*p, true).bytes() : Shares<float>(*p, true).bytes();
}
void diff_attention_forward(const Problem* p, bool in_bf16, char* room) {
    in_bf16 ? forward<bf16>(*p, room) : forward<float>(*p, room);
}
void diff_attention_backward(const Problem* p, bool in_bf16, char* room) {
    in_bf16 ? backward<bf16>(*p, room) : backward<float>(*p, room);
}
}
