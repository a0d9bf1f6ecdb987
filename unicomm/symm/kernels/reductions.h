// Reductions of kernels.cu, which includes this file after the declarations that it needs.
#pragma once

// --- reducing: in order of the ranks, half precision in float, rounded once ---------------------------------

struct Half {
    unsigned short bits;
};
struct Bfloat {
    unsigned short bits;
};
template <class T, class A>
struct Same {
    typedef A Wider;
    __device__ static A up(T x) { return A(x); }
    __device__ static T down(A x) { return T(x); }
};
template <class T>
struct Number;
template <>
struct Number<double> : Same<double, double> {};
template <>
struct Number<float> : Same<float, float> {};
template <>
struct Number<signed char> : Same<signed char, Int> {};
template <>
struct Number<short> : Same<short, Int> {};
template <>
struct Number<int> : Same<int, Int> {};
template <>
struct Number<Int> : Same<Int, Int> {};
template <>
struct Number<unsigned char> : Same<unsigned char, Word> {};
template <>
struct Number<unsigned short> : Same<unsigned short, Word> {};
template <>
struct Number<unsigned> : Same<unsigned, Word> {};
template <>
struct Number<Word> : Same<Word, Word> {};
template <>
struct Number<Half> {
    typedef float Wider;
    __device__ static float up(Half x) { return half_to_float(x.bits); }
    __device__ static Half down(float x) { return {float_to_half(x)}; }
};
template <>
struct Number<Bfloat> {
    typedef float Wider;
    union Bits {
        float value;
        unsigned bits;
    };
    __device__ static float up(Bfloat x) {
        Bits b;
        b.bits = unsigned(x.bits) << 16;
        return b.value;
    }
    __device__ static Bfloat down(float x) {
        Bits b;
        b.value = x;
        if (x != x) return {(unsigned short)(b.bits >> 16 | 64)};  // quiet
        return {(unsigned short)((b.bits + 0x7fff + (b.bits >> 16 & 1)) >> 16)};  // to even
    }
};

template <class A>
__device__ A sum(A a, A b) {
    return a + b;
}
template <class A>
__device__ A product(A a, A b) {
    return a * b;
}
template <class A>
__device__ bool less(A a, A b) {
    return a < b;
}
template <>
__device__ float sum(float a, float b) {
    return float_sum(a, b);
}
template <>
__device__ float product(float a, float b) {
    return float_product(a, b);
}
template <>
__device__ bool less(float a, float b) {
    return float_less(a, b);
}
// Integers wrap around.
template <>
__device__ Int sum(Int a, Int b) {
    return Int(Word(a) + Word(b));
}
template <>
__device__ Int product(Int a, Int b) {
    return Int(Word(a) * Word(b));
}

template <class A>
__device__ A fold(A a, A b, Int red) {
    if (red == kSum) return sum(a, b);
    if (red == kProduct) return product(a, b);
    if (b != b) return b;  // NaN propagates, also from the first
    return red == kMin ? (less(b, a) ? b : a) : (less(a, b) ? b : a);
}

template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Pack {
    T each[kCount];
};

// Reduces kCount adjacent elements, `from` and `to` bytes from the beginning.
template <class T, int kCount>
__device__ void reduce_pack(const Args& a, Int from, Int to) {
    typedef Pack<T, kCount> P;
    typename Number<T>::Wider total[kCount];
    P x = *theirs<P>(a, a.in + from, 0), out;
    for (int i = 0; i < kCount; ++i) total[i] = Number<T>::up(x.each[i]);
    for (Int p = 1; p < a.world; ++p) {
        x = *theirs<P>(a, a.in + from, p);
        for (int i = 0; i < kCount; ++i) total[i] = fold(total[i], Number<T>::up(x.each[i]), a.red);
    }
    for (int i = 0; i < kCount; ++i) out.each[i] = Number<T>::down(total[i]);
    if (!a.spread) *at<P>(a.out + to) = out;
    for (Int i = 0; a.spread && i < a.world; ++i) *theirs<P>(a, a.out + to, (a.rank + i) % a.world) = out;
}

template <class T>
__device__ void reduce(const Args& a) {
    if (control(a)[kVerdict] != kGood) return;
    const Int element = sizeof(T), kCount = 16 / sizeof(T);
    Int first = Int(blockIdx.x) * blockDim.x + threadIdx.x, step = Int(gridDim.x) * blockDim.x;
    bool side_by_side = a.in_column_step == 1 && a.out_column_step == 1;
    bool aligned = (a.in | a.out) % 16 == 0 &&
                   (a.rows == 1 || (a.in_row_step * element | a.out_row_step * element) % 16 == 0);
    Int packs = side_by_side && aligned ? a.columns / kCount : 0, rest = a.columns - packs * kCount;
    for (Int i = first; i < a.rows * packs; i += step) {
        Int row = i / packs, column = i % packs * kCount;
        reduce_pack<T, kCount>(a, (row * a.in_row_step + column) * element,
                               (row * a.out_row_step + column) * element);
    }
    for (Int i = first; i < a.rows * rest; i += step) {
        Int row = i / rest, column = packs * kCount + i % rest;
        reduce_pack<T, 1>(a, (row * a.in_row_step + column * a.in_column_step) * element,
                          (row * a.out_row_step + column * a.out_column_step) * element);
    }
}

#define SYMM_REDUCE(name, T) \
    extern "C" __global__ void symm_reduce_##name(Args a) { reduce<T>(a); }
SYMM_REDUCE(float64, double)
SYMM_REDUCE(float32, float)
SYMM_REDUCE(float16, Half)
SYMM_REDUCE(bfloat16, Bfloat)
SYMM_REDUCE(int8, signed char)
SYMM_REDUCE(int16, short)
SYMM_REDUCE(int32, int)
SYMM_REDUCE(int64, Int)
SYMM_REDUCE(uint8, unsigned char)
SYMM_REDUCE(uint16, unsigned short)
SYMM_REDUCE(uint32, unsigned)
SYMM_REDUCE(uint64, Word)
