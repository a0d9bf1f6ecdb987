// Reductions of tiles, line by line.
#include "symm/tiles.hpp"

#include <cstring>
#include <utility>

namespace unicomm::symm {
namespace {

// Copies one line of elements that are `step` apart to a dense line, and back.
template <class T>
void pack_line(char* to, const char* from, int64_t step, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        std::memcpy(to + i * sizeof(T), from + i * step * sizeof(T), sizeof(T));
}
template <class T>
void spread_line(char* to, const char* from, int64_t step, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        std::memcpy(to + i * step * sizeof(T), from + i * sizeof(T), sizeof(T));
}

struct Wide {  // complex128
    uint64_t a, b;
};

void pack(char* to, const char* from, int64_t step, int64_t count, int element) {
    if (element == 1) return pack_line<uint8_t>(to, from, step, count);
    if (element == 2) return pack_line<uint16_t>(to, from, step, count);
    if (element == 4) return pack_line<uint32_t>(to, from, step, count);
    if (element == 8) return pack_line<uint64_t>(to, from, step, count);
    pack_line<Wide>(to, from, step, count);
}

void spread(char* to, const char* from, int64_t step, int64_t count, int element) {
    if (element == 1) return spread_line<uint8_t>(to, from, step, count);
    if (element == 2) return spread_line<uint16_t>(to, from, step, count);
    if (element == 4) return spread_line<uint32_t>(to, from, step, count);
    if (element == 8) return spread_line<uint64_t>(to, from, step, count);
    spread_line<Wide>(to, from, step, count);
}

Tile turned(Tile t) {
    std::swap(t.rows, t.columns);
    std::swap(t.row_step, t.column_step);
    return t;
}

}  // namespace

bool fold_all(DType dtype, Red red, char* out, const std::vector<const char*>& sources, int64_t at,
              int64_t count) {
    std::vector<const void*> from(sources.size());
    for (size_t i = 0; i < from.size(); ++i) from[i] = sources[i] + at;
    return fold(dtype, red, out, from.data(), int(from.size()), count, nullptr, 0);
}

uint64_t span_of(const Tile& t) {
    if (t.rows == 0 || t.columns == 0) return 0;
    return uint64_t((t.rows - 1) * t.row_step + (t.columns - 1) * t.column_step + 1);
}

bool fold_tiles(DType dtype, Red red, Tile out, Tile in, const std::vector<const char*>& sources) {
    if (in.column_step != 1 && in.row_step == 1) in = turned(in), out = turned(out);
    bool lines = (in.column_step == 1 || in.columns == 1) && (out.column_step == 1 || out.columns == 1);
    if (lines && in.row_step == in.columns && out.row_step == out.columns) {
        return fold_all(dtype, red, out.data, sources, 0, in.rows * in.columns);
    }
    int element = dtype_bytes(dtype);
    uint64_t line = uint64_t(in.columns) * uint64_t(element);
    std::vector<char> room(lines ? 0 : line * (sources.size() + 1));
    std::vector<const char*> packed(sources.size());
    for (size_t i = 0; i < packed.size() && !lines; ++i) packed[i] = room.data() + line * i;
    char* result = room.data() + line * sources.size();
    for (int64_t row = 0; row < in.rows; ++row) {
        int64_t at = row * in.row_step * element;
        char* to = out.data + row * out.row_step * element;
        if (lines) {
            if (!fold_all(dtype, red, to, sources, at, in.columns)) return false;
            continue;
        }
        for (size_t i = 0; i < packed.size(); ++i) {
            pack(room.data() + line * i, sources[i] + at, in.column_step, in.columns, element);
        }
        if (!fold_all(dtype, red, result, packed, 0, in.columns)) return false;
        spread(to, result, out.column_step, in.columns, element);
    }
    return true;
}

}  // namespace unicomm::symm
