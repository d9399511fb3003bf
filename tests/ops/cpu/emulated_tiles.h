// The tile instructions (AMX) that native.cpp uses, as functions, for processors without them. One state for each thread;
// a tile that is used before the configuration is loaded, or after it is released, is NaN.

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <limits>

#undef _tile_loadconfig
#define _tile_loadconfig emulated_loadconfig
#undef _tile_release
#define _tile_release emulated_release
#undef _tile_zero
#define _tile_zero emulated_zero
#undef _tile_loadd
#define _tile_loadd emulated_loadd
#undef _tile_stored
#define _tile_stored emulated_stored
#undef _tile_dpbf16ps
#define _tile_dpbf16ps emulated_dpbf16ps
#define __AMX_BF16__ 1
#define __AMX_TILE__ 1

struct EmulatedTiles {
    bool configured = false;
    uint32_t words[8][16][16];
    void forget() {
        configured = false;
        for (auto& tile : words)
            for (auto& row : tile)
                for (auto& word : row) word = 0x7fc07fc0;
    }
};
inline thread_local EmulatedTiles emulated;

inline void emulated_loadconfig(const void* shape) {
    const auto* bytes = static_cast<const uint8_t*>(shape);
    emulated.forget();
    emulated.configured = bytes[0] == 1;
    for (int tile = 0; tile < 8; tile++) {
        uint16_t columns;
        std::memcpy(&columns, bytes + 16 + 2 * tile, 2);
        emulated.configured = emulated.configured && columns == 64 && bytes[48 + tile] == 16;
    }
}
inline void emulated_release() { emulated.forget(); }
inline void emulated_zero(int tile) { std::memset(emulated.words[tile], emulated.configured ? 0 : 0xff, sizeof(emulated.words[tile])); }
inline void emulated_loadd(int tile, const void* from, int64_t stride) {
    for (int row = 0; row < 16 && emulated.configured; row++)
        std::memcpy(emulated.words[tile][row], static_cast<const char*>(from) + row * stride, 64);
}
inline void emulated_stored(int tile, void* to, int64_t stride) {
    for (int row = 0; row < 16; row++) std::memcpy(static_cast<char*>(to) + row * stride, emulated.words[tile][row], 64);
}
inline float emulated_number(uint32_t word, int which) {
    const uint32_t bits = which ? word & 0xffff0000u : word << 16;
    float number;
    std::memcpy(&number, &bits, 4);
    return number;
}
inline void emulated_dpbf16ps(int c, int a, int b) {
    float numbers[2][16][16], sums[16];
    for (int which = 0; which < 2; which++)
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < 16; j++) numbers[which][k][j] = emulated_number(emulated.words[b][k][j], which);
    for (int row = 0; row < 16; row++) {
        std::memcpy(sums, emulated.words[c][row], 64);
        for (int k = 0; k < 16; k++)
            for (int which = 0; which < 2; which++) {
                const float factor = emulated_number(emulated.words[a][row][k], which);
                for (int j = 0; j < 16; j++) sums[j] += factor * numbers[which][k][j];
            }
        std::memcpy(emulated.words[c][row], sums, 64);
    }
}
