// torch.ops.symm_mem on CPU tensors: one-sided copies, signals, and a product that waits for signals.
#pragma once
#include "kernels.hpp"

namespace unicomm_torch {

inline Tensor words_of(const Tensor& input, int64_t offset, int64_t count) {
    TORCH_CHECK(input.dim() == 1 && input.is_contiguous() && input.scalar_type() == at::kUInt32,
                "input has to be a flat contiguous tensor of uint32");
    TORCH_CHECK(offset >= 0 && count > 0 && offset + count <= input.numel(), "elements ", offset, " to ",
                offset + count, " of ", input.numel());
    return input.narrow(0, offset, count);
}

inline Tensor memset32_(Tensor input, int64_t offset, int64_t value, int64_t count) {
    TORCH_CHECK(value >= 0 && value <= int64_t(UINT32_MAX), "val=", value, " has no 32 bits");
    Tensor words = words_of(input, offset, count);
    auto* at = static_cast<uint32_t*>(words.mutable_data_ptr());
    for (int64_t i = 0; i < count; ++i) {
        Word(at[i]).store(uint32_t(value));
        wake(at + i);
    }
    return input;
}

inline Tensor stream_write_value32_(Tensor input, int64_t offset, int64_t value) {
    return memset32_(input, offset, value, 1);
}

// `peer` of the operations below is a rank of the job's group, or of the only group in which the tensor has
// met.

inline void put(Tensor tensor, int64_t peer) {
    of_rank(Memory::one().any(tensor), tensor, peer).copy_(tensor);
}

inline void get(Tensor tensor, int64_t peer) {
    tensor.copy_(of_rank(Memory::one().any(tensor), tensor, peer));
}

inline uint64_t* signal_word(const Tensor& pad) {
    TORCH_CHECK(pad.itemsize() == 8 && pad.numel() >= 1, "sigpad has to be a tensor of int64 or uint64");
    return static_cast<uint64_t*>(const_cast<void*>(pad.const_data_ptr()));
}

inline void put_with_signal(Tensor tensor, Tensor pad, int64_t signal, int64_t peer) {
    auto pads = Memory::one().any(pad);
    auto &ranks = Memory::one().any(tensor)->get_rank_to_global_rank(),
         &pad_ranks = pads->get_rank_to_global_rank();
    TORCH_CHECK(ranks == pad_ranks, "the tensor has met in a group of ranks ", c10::ArrayRef<int>(ranks),
                ", sigpad in one of ranks ", c10::ArrayRef<int>(pad_ranks), ": rank ", peer,
                " has to be the same rank in both");
    uint64_t* word = signal_word(of_rank(pads, pad, peer));
    put(tensor, peer);
    std::atomic_ref<uint64_t>(*word).store(uint64_t(signal));
    wake(word);
}

inline void wait_for_signal(Tensor pad, int64_t signal, int64_t peer) {
    auto handle = Memory::one().any(pad);
    handle->check_rank(peer);
    handle->await_word<uint64_t>(
        signal_word(pad), [&](uint64_t v) { return v == uint64_t(signal); }, int(peer), 0, "signal");
}

inline Handles own_handle(const c10::intrusive_ptr<sm::SymmetricMemory>& memory) {
    auto handle = c10::dynamic_intrusive_pointer_cast<Handle>(memory);
    TORCH_CHECK(handle, "the handle is of another backend");
    return handle;
}

inline void handle_put_signal(const Tensor& source, const c10::intrusive_ptr<sm::SymmetricMemory>& memory,
                              int64_t peer) {
    auto handle = own_handle(memory);
    handle->check_rank(peer);
    handle->get_buffer(int(peer), source.sizes(), source.scalar_type(), 0).copy_(source);
    handle->count_signal(int(peer));
}

inline void handle_wait_signal(const c10::intrusive_ptr<sm::SymmetricMemory>& memory, int64_t peer) {
    auto handle = own_handle(memory);
    handle->await_count(int(peer));
}

// The value belongs to the allocation, beside the program's memory and pad, and stays until the next one.
inline void put_with_value(Tensor tensor, int64_t signal, int64_t peer) {
    put(tensor, peer);
    uint64_t* word = Memory::one().any(tensor)->value_of(int(peer));
    std::atomic_ref<uint64_t>(*word).store(uint64_t(signal));
    wake(word);
}

inline void wait_for_value(Tensor tensor, int64_t signal) {
    auto handle = Memory::one().any(tensor);
    await_word<uint64_t>(
        handle->value_of(handle->get_rank()), [&](uint64_t v) { return v >= uint64_t(signal); },
        [&](size_t) { handle->check_anybody_left(); });
}

// `offset` and `size` count elements of dst's dtype, from the beginning of the peer's allocation.
inline void get_out(Tensor dst, const c10::intrusive_ptr<sm::SymmetricMemory>& memory, int64_t offset,
                    int64_t size, int64_t peer) {
    auto handle = own_handle(memory);
    handle->check_rank(peer);
    TORCH_CHECK(dst.is_contiguous() && offset >= 0 && size >= 0 && size <= dst.numel(), "elements ", offset,
                " to ", offset + size, " do not go into a dst of ", dst.numel(),
                ", which has to be contiguous");
    dst.view(-1).narrow(0, 0, size).copy_(handle->get_buffer(int(peer), {size}, dst.scalar_type(), offset));
}

// What a store to a multicast address does: copies into the memory of each rank. The ranks do not meet.
inline Tensor copy_to_all(Tensor out, const Tensor& source, int64_t byte_offset, std::string group) {
    auto handle = handle_of(out, group, "symm_mem_out");
    TORCH_CHECK(out.is_contiguous() && source.is_contiguous() && byte_offset >= 0 &&
                    byte_offset + int64_t(source.nbytes()) <= int64_t(out.nbytes()),
                "bytes ", byte_offset, " to ", byte_offset + int64_t(source.nbytes()), " do not lie in ",
                out.nbytes(), " bytes; both tensors have to be contiguous");
    for (int p = 0; p < handle->get_world_size() && source.nbytes(); ++p) {
        auto* to = static_cast<char*>(of_rank(handle, out, p).mutable_data_ptr());
        std::memcpy(to + byte_offset, source.const_data_ptr(), source.nbytes());
    }
    return out;
}

// Computes a @ b in chunks of a's rows. Each chunk is ready when its signal is 1; the pivot's is the first.
inline Tensor async_input_mm(const Tensor& a, const Tensor& b, const Tensor& signals, int64_t pivot) {
    TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0) && a.scalar_type() == b.scalar_type(),
                "a ", a.sizes(), " and b ", b.sizes(), " are no matrices that can be multiplied");
    int64_t n = signals.numel();
    TORCH_CHECK(
        signals.dim() == 1 && signals.is_contiguous() && signals.scalar_type() == at::kUInt32 && n > 0,
        "a_chunk_signals has to be a flat contiguous tensor of uint32");
    TORCH_CHECK(a.size(0) % n == 0, "the ", a.size(0), " rows of a are not ", n, " equal chunks");
    TORCH_CHECK(pivot >= 0 && pivot < n, "a_chunk_pivot=", pivot, " of ", n, " chunks");
    auto* words = static_cast<uint32_t*>(const_cast<void*>(signals.const_data_ptr()));
    Handles handle =
        Memory::one().find(signals.storage().mutable_data()) ? Memory::one().any(signals) : Handles();
    Tensor out = at::empty({a.size(0), b.size(1)}, a.options());
    bool warned = false;
    for (int64_t i = 0; i < n; ++i) {
        int64_t chunk = (pivot + i) % n, rows = a.size(0) / n;
        await_word<uint32_t>(
            words + chunk, [](uint32_t v) { return v == 1; },
            [&](size_t passed_ms) {
                if (handle) handle->check_anybody_left();
                if (warned || passed_ms < 10'000) return;
                warned = true;
                std::string text = "_async_input_mm has waited 10 s for a_chunk_signals[" +
                                   std::to_string(chunk) +
                                   "]. On the CPU it returns when all chunks are multiplied: what sets the "
                                   "signals has to come before it, or from another thread or rank.";
                py::gil_scoped_acquire gil;
                if (PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) != 0) throw py::error_already_set();
            });
        Tensor part = out.narrow(0, chunk * rows, rows);
        at::mm_out(part, a.narrow(0, chunk * rows, rows), b);
    }
    return out;
}

}  // namespace unicomm_torch
