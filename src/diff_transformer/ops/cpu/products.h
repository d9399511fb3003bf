// Products of small matrices in cache, and the packing of their operands.
//
// All products work on 32-bit words: a word is one float, or two bf16 numbers adjacent along the contraction. Kw: words in
// a contraction. B is packed in panels of round_up to 32 columns, [contraction][column]. If the processor multiplies tiles
// (AMX), bf16 uses them; otherwise the numbers of A are broadcast.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

// Vectors of W floats, by the compiler's vector extension.

#if defined(__AVX512F__)
constexpr int W = 16, MR = 8;
#else  // AVX2
constexpr int W = 8, MR = 6;
#endif
constexpr int NV = 2;            // vectors of columns that the kernel works on, and MR rows
constexpr int NR = 32;           // columns of a panel
constexpr int HALF = 16;         // columns of a narrow last panel
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

typedef float vf __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * W), aligned(4), may_alias));

inline vf load(const float* p) { return *reinterpret_cast<const vf*>(p); }
inline void store(float* p, vf x) { *reinterpret_cast<vf*>(p) = x; }

inline vf broadcast(float x) {
#ifdef __AVX512F__
    return (vf)_mm512_set1_ps(x);
#else
    return x - vf{};  // GCC compiles a loop to an insert for each number
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
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)x);
#endif
    float top = x[0];
    for (int i = 1; i < W; i++) top = std::max(top, x[i]);
    return top;
}

inline vf maximum(vf a, vf b) { return a > b ? a : b; }

// The largest of n numbers, a multiple of 2 W; comparisons with NaN are false, so it may miss a NaN.
inline float largest(const float* s, int64_t n) {
    vf tops[2] = {load(s), load(s + W)};
    for (int64_t i = 2 * W; i < n; i += 2 * W) {
        tops[0] = maximum(load(s + i), tops[0]);
        tops[1] = maximum(load(s + i + W), tops[1]);
    }
    return largest(maximum(tops[0], tops[1]));
}
inline bool any_nan(const float* s, int64_t n) {
    return std::any_of(s, s + n, [](float x) { return x != x; });
}

// a b + c, rounded once, for a c that has been rounded; otherwise compilers may skip the rounding of c.
inline vf multiplied_and_added(vf a, vf b, vf c) {
#ifdef __AVX512F__
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    asm("" : "+x"(c));
    return a * b + c;
#endif
}

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

// Numbers in memory.

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

constexpr int TILE = 16;  // rows of a tile, and words of each
constexpr int DEEP = 256;  // words of a long contraction in one pass
constexpr int64_t STRIP = 2 * TILE;  // queries of a product

// Number formats. Number: of the inputs; pairs: a word holds two of them; tiles: AMX multiplies them. Rows are padded to a
// multiple of `rows`, contractions to one of `deep` words. `chunk`: keys at a time in the forward pass.
struct Fp32 {
    using Number = float;
    static constexpr bool pairs = false, tiles = false;
    static constexpr int64_t rows = 8, deep = 1, chunk = W == 8 ? 256 : 512;
};
struct Bf16AsFp32 : Fp32 {
    using Number = bf16;
};
struct Bf16Pairs : Bf16AsFp32 {
    static constexpr bool pairs = true;
};
struct Bf16Tiles : Bf16Pairs {
    static constexpr bool tiles = true;
    static constexpr int64_t rows = STRIP, deep = TILE;
};
// How this library multiplies bf16; setup.py compiles one library for each.
#if defined(__AMX_BF16__)
using Bf16 = Bf16Tiles;
#elif defined(__AVX512BF16__)
using Bf16 = Bf16Pairs;
#else
using Bf16 = Bf16AsFp32;
#endif

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
template <typename Format>
inline int64_t words(int64_t n) { return round_up(Format::pairs ? (n + 1) / 2 : n, Format::deep); }
template <typename Format>
inline int64_t padded_rows(int64_t n) { return round_up(n, Format::rows); }
inline int64_t columns(int64_t n) { return round_up(n, HALF); }
inline int width(int64_t n, int64_t column) { return n - column > HALF ? NR : HALF; }  // of the panel at this column

// The product.

inline float as_float(uint32_t word) {
    float x;
    std::memcpy(&x, &word, 4);
    return x;
}

template <bool pairs>
inline vf multiply_add(vf c, uint32_t a, const uint32_t* b) {
    if constexpr (pairs) {
#ifdef __AVX512BF16__
        return (vf)_mm512_dpbf16_ps((__m512)c, (__m512bh)_mm512_set1_epi32(a), (__m512bh)_mm512_loadu_si512(b));
#else
        return c;
#endif
    } else
        return c + broadcast(as_float(a)) * load(reinterpret_cast<const float*>(b));
}

// One step of a tile's contraction, with the vectors of B in registers: GCC would load them again for each row.
template <int mr, int nv>
inline void step_of_avx2(vf (&total)[mr][nv], const uint32_t* a, int64_t by_row, const uint32_t* b) {
    vf of_b[nv];
    for (int j = 0; j < nv; j++) {
        of_b[j] = load(reinterpret_cast<const float*>(b) + j * W);
        asm("" : "+x"(of_b[j]));
    }
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 2
        for (int j = 0; j < nv; j++) total[i][j] += broadcast(as_float(a[i * by_row])) * of_b[j];
}

// C[mr][nv * W] (+)= A B: A(i, k) = a[i * by_row + k * by_k], B(k, j) = b[k * ldb + j].
template <bool pairs, int mr, int nv>
inline void tile(int64_t Kw, const uint32_t* a, int64_t by_row, int64_t by_k, const uint32_t* b, int ldb, float* c,
                 int64_t ldc, bool add) {
    vf total[mr][nv];
    for (int i = 0; i < mr; i++)
        for (int j = 0; j < nv; j++) total[i][j] = add ? load(c + i * ldc + j * W) : broadcast(0.0f);
    for (int64_t k = 0; k < Kw; k++, a += by_k, b += ldb)
        if constexpr (W == 8)
            step_of_avx2(total, a, by_row, b);
        else
#pragma GCC unroll 8
            for (int i = 0; i < mr; i++)
#pragma GCC unroll 2
                for (int j = 0; j < nv; j++) total[i][j] = multiply_add<pairs>(total[i][j], a[i * by_row], b + j * W);
    for (int i = 0; i < mr; i++)
        for (int j = 0; j < nv; j++) store(c + i * ldc + j * W, total[i][j]);
}

template <bool pairs, int mr>
inline void tiles_of_panel(int64_t Kw, const uint32_t* a, int64_t by_row, int64_t by_k, const uint32_t* b, int n,
                           float* c, int64_t ldc, bool add) {
    int j = 0;
    for (; j + NV * W <= n; j += NV * W) tile<pairs, mr, NV>(Kw, a, by_row, by_k, b + j, n, c + j, ldc, add);
    for (; j < n; j += W) tile<pairs, mr, 1>(Kw, a, by_row, by_k, b + j, n, c + j, ldc, add);
}

// The same for a panel of 32 or 16 columns. Returns how many of the `left` rows, a multiple of 8 in all, it computed: MR,
// or 4 at the end where MR does not divide 8.
template <bool pairs>
inline int panel(int64_t left, int64_t Kw, const uint32_t* a, int64_t by_row, int64_t by_k, const uint32_t* b, int n,
                 float* c, int64_t ldc, bool add) {
    if (8 % MR && (left < MR || left == 8)) {
        tiles_of_panel<pairs, 4>(Kw, a, by_row, by_k, b, n, c, ldc, add);
        return 4;
    }
    tiles_of_panel<pairs, MR>(Kw, a, by_row, by_k, b, n, c, ldc, add);
    return MR;
}

#ifdef __AMX_BF16__
// C[tall * 16][wide * 16] (+)= A B in tiles. Rows of A are lda words apart, steps of the contraction in B ldb words.
// Tile registers 0 to 3 hold C, 4 and 5 A, 6 and 7 B.
template <int tall, int wide>
inline void multiply_tiles(int64_t Kw, const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, float* c, int64_t ldc,
                     bool add) {
    if (add) {
        _tile_loadd(0, c, 4 * ldc);
        if constexpr (wide > 1) _tile_loadd(1, c + TILE, 4 * ldc);
        if constexpr (tall > 1) _tile_loadd(2, c + TILE * ldc, 4 * ldc);
        if constexpr (tall > 1 && wide > 1) _tile_loadd(3, c + TILE * ldc + TILE, 4 * ldc);
    } else {
        _tile_zero(0);
        if constexpr (wide > 1) _tile_zero(1);
        if constexpr (tall > 1) _tile_zero(2);
        if constexpr (tall > 1 && wide > 1) _tile_zero(3);
    }
    for (int64_t k = 0; k < Kw; k += TILE, a += TILE, b += TILE * ldb) {
        _tile_loadd(4, a, 4 * lda);
        _tile_loadd(6, b, 4 * ldb);
        _tile_dpbf16ps(0, 4, 6);
#pragma GCC unroll 16
        for (int i = TILE; i < 2 * TILE; i++)  // B of the next step, or of the panel behind
            for (int j = 0; j < wide; j++)
                _mm_prefetch(reinterpret_cast<const char*>(b + i * ldb + j * TILE), _MM_HINT_T0);
        if constexpr (wide > 1) {
            _tile_loadd(7, b + TILE, 4 * ldb);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (tall > 1) {
            _tile_loadd(5, a + TILE * lda, 4 * lda);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (wide > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, 4 * ldc);
    if constexpr (wide > 1) _tile_stored(1, c + TILE, 4 * ldc);
    if constexpr (tall > 1) _tile_stored(2, c + TILE * ldc, 4 * ldc);
    if constexpr (tall > 1 && wide > 1) _tile_stored(3, c + TILE * ldc + TILE, 4 * ldc);
}

// Configures this thread's tiles as 16 rows of 16 words, for the lifetime of the object.
class Tiles {
  public:
    Tiles() { _tile_loadconfig(&shape); }
    ~Tiles() { _tile_release(); }

  private:
    struct alignas(64) Shape {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    };
    // Static, because compilers assume that the instruction reads the first bytes only, and drop stores to the others.
    static constexpr Shape shape = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
};
#else
template <int tall, int wide>
inline void multiply_tiles(int64_t, const uint32_t*, int64_t, const uint32_t*, int64_t, float*, int64_t, bool) {}
struct Tiles {};
#endif

// State that a thread needs while it multiplies in this form.
template <bool tiles>
struct SessionOf {};
template <>
struct SessionOf<true> : Tiles {};
template <typename Format>
using Session = SessionOf<Format::tiles>;

// Lets the cache fetch MR rows of NR numbers that are written next.
inline void prefetch_rows(const float* c, int64_t ldc) {
    for (int64_t i = 0; i < MR; i++)
        for (int64_t j = 0; j < NR; j += HALF) __builtin_prefetch(c + i * ldc + j, 1);
}

// C[rows][n] (+)= A[rows][Kw] B, with B in panels at b + column * Kb, from word k0 of Kb.
template <typename Format>
[[gnu::noinline]] void product(int64_t rows, int64_t n, int64_t Kw, const uint32_t* a, int64_t lda, const uint32_t* b,
                               int64_t Kb, int64_t k0, float* c, int64_t ldc, bool add) {
    for (int64_t k = 0; k < Kw; k += DEEP, add = true)
        for (int64_t j = 0; j < columns(n); j += NR) {
            const int wide = width(n, j);
            const uint32_t* from = b + j * Kb + (k0 + k) * wide;
            const int64_t deep = std::min<int64_t>(DEEP, Kw - k);
            for (int64_t i = 0, done; i < rows; i += done)
                if constexpr (!Format::tiles) {
                    if (j + NR < n) prefetch_rows(c + i * ldc + j + NR, ldc);
                    done = panel<Format::pairs>(rows - i, deep, a + i * lda + k, lda, 1, from, wide, c + i * ldc + j, ldc, add);
                } else {
                    done = STRIP;
                    if (wide == NR)
                        multiply_tiles<2, 2>(deep, a + i * lda + k, lda, from, wide, c + i * ldc + j, ldc, add);
                    else
                        multiply_tiles<2, 1>(deep, a + i * lda + k, lda, from, wide, c + i * ldc + j, ldc, add);
                }
        }
}

// The gradient of NR keys, C += A^T B over rows, with A(row word, key) = a[key + word * lda]. In vectors C is [keys][n], and
// B in panels at b + column * Kb, from word k0. In tiles C is [n][keys], and B is transposed: [n][Kb].
template <typename Format>
[[gnu::noinline]] void outer_product(int64_t n, int64_t Kw, const uint32_t* a, int64_t lda, const uint32_t* b,
                                     int64_t Kb, int64_t k0, float* c) {
    for (int64_t j = 0; j < columns(n); j += NR) {
        const int wide = width(n, j);
        if constexpr (!Format::tiles)
            for (int64_t i = 0, done; i < NR; i += done) {
                prefetch_rows(c + (i + MR) * columns(n) + j, columns(n));  // at the last, of the next NR keys
                done = panel<Format::pairs>(NR - i, Kw, a + i, 1, lda, b + j * Kb + k0 * wide, wide, c + i * columns(n) + j,
                                          columns(n), true);
            }
        else if (wide == NR)
            multiply_tiles<2, 2>(Kw, b + j * Kb + k0, Kb, a, lda, c + j * NR, NR, true);
        else
            multiply_tiles<1, 2>(Kw, b + j * Kb + k0, Kb, a, lda, c + j * NR, NR, true);
    }
}

// Packing.

// One row of n numbers as words.
template <typename Format>
inline void words_of_row(const typename Format::Number* x, int64_t n, uint32_t* to) {
    if constexpr (!Format::pairs)
        for (int64_t i = 0; i < n; i++) to[i] = word_of(widen(x[i]));
    else {
        std::memcpy(to, x, 2 * (n / 2 * 2));
        if (n % 2) to[n / 2] = x[n - 1].bits;
        for (int64_t i = (n + 1) / 2; i < words<Format>(n); i++) to[i] = 0;
    }
}

// Rows as operand A of a product: [padded rows][words of n], zeros below.
template <typename Format>
void pack_rows(const typename Format::Number* x, int64_t stride, int64_t rows, int64_t n, uint32_t* to) {
    const int64_t Kw = words<Format>(n);
    for (int64_t i = 0; i < rows; i++) words_of_row<Format>(x + i * stride, n, to + i * Kw);
    std::memset(to + rows * Kw, 0, 4 * Kw * (padded_rows<Format>(rows) - rows));
}

// Rows as columns of B, contracted over their width: panels of NR rows, [words of n][NR].
template <typename Format>
void pack_transposed(const typename Format::Number* x, int64_t stride, int64_t rows, int64_t n, uint32_t* to) {
    const int64_t Kw = words<Format>(n);
    uint32_t line[NR][256];
    for (int64_t first = 0; first < rows; first += NR, to += Kw * NR) {
        const int64_t here = std::min<int64_t>(NR, rows - first);
        for (int64_t i = 0; i < here; i++) words_of_row<Format>(x + (first + i) * stride, n, line[i]);
        for (int64_t i = here; i < NR; i++) std::memset(line[i], 0, 4 * Kw);
        for (int64_t k = 0; k < Kw; k++)
            for (int64_t i = 0; i < NR; i++) to[k * NR + i] = line[i][k];
    }
}

// Rows as B, contracted over the rows: panels of columns, [Kw words of rows][columns of the panel], zeros below.
template <typename Format>
void pack_columns(const typename Format::Number* x, int64_t stride, int64_t rows, int64_t n, int64_t Kw, uint32_t* to) {
    constexpr int step = Format::pairs ? 2 : 1;
    for (int64_t j = 0; j < columns(n); j += NR) {
        const int wide = width(n, j);
        const int64_t filled = std::min<int64_t>(wide, n - j);
        for (int64_t k = 0; k < Kw; k++, to += wide) {
            const typename Format::Number* row = x + k * step * stride + j;
            int64_t i = 0;
            if (k * step < rows) {
                if constexpr (!Format::pairs)
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

// Rows as operand B of an outer product, contracted over Kw words of rows; in tiles transposed, [columns][Kw]; zero-padded.
template <typename Format>
void pack_outer(const typename Format::Number* x, int64_t stride, int64_t rows, int64_t n, int64_t Kw, uint32_t* to) {
    if constexpr (!Format::tiles) return pack_columns<Format>(x, stride, rows, n, Kw, to);
    std::memset(to, 0, 4 * Kw * columns(n));
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < n; j++) reinterpret_cast<typename Format::Number*>(to + j * Kw)[i] = x[i * stride + j];
}

// W floats as words of one row of A: as they are, or rounded to bf16 in pairs.
template <bool pairs>
inline void put_words(uint32_t* to, int64_t at, vf x) {
    if constexpr (pairs) {
#ifdef __AVX512BF16__
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + at / 2), (__m256i)_mm512_cvtneps_pbh((__m512)x));
#endif
    } else
        store(reinterpret_cast<float*>(to) + at, x);
}

// W floats of two consecutive rows, as words of the transposed A.
template <bool pairs>
inline void put_two_rows(uint32_t* to, int64_t ld, vf upper, vf lower) {
    if constexpr (pairs) {
#ifdef __AVX512BF16__
        __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)upper));
        __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)lower));
        _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
#endif
    } else {
        store(reinterpret_cast<float*>(to), upper);
        store(reinterpret_cast<float*>(to) + ld, lower);
    }
}

}  // namespace
