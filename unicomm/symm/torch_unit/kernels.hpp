// torch.ops.symm_mem on CPU tensors: the collectives of a group. The ranks meet before an operation reads or
// writes memory of another rank, and again before it returns.
#pragma once
#include <torch/library.h>

#include "memory.hpp"

namespace unicomm_torch {

using at::Tensor;

inline Handles handle_of(const Tensor& tensor, const std::string& group, const char* name) {
    auto found = sm::rendezvous(tensor, group);
    auto handle = c10::dynamic_intrusive_pointer_cast<Handle>(found);
    TORCH_CHECK(handle, name,
                " is not in symmetric memory: allocate it with symm_mem.empty(..., device=\"cpu\")");
    return handle;
}

// Returns where the tensor of `rank` at the same place begins.
inline char* address_of(const Handles& handle, const Tensor& like, int64_t rank) {
    handle->check_rank(rank);
    return static_cast<char*>(handle->get_buffer_ptrs()[size_t(rank)]) +
           like.storage_offset() * like.itemsize();
}

// Returns the tensor of `rank` at the same place.
inline Tensor of_rank(const Handles& handle, const Tensor& like, int64_t rank) {
    return at::from_blob(address_of(handle, like, rank), like.sizes(), like.strides(), like.options());
}

inline void check_sum(const std::string& op) {
    TORCH_CHECK(op == "sum", "reduction '", op,
                "' is not defined here; torch's own backends have \"sum\" only");
}

inline void check_like(const Tensor& a, const Tensor& b, const char* what) {
    TORCH_CHECK(a.scalar_type() == b.scalar_type() && a.numel() == b.numel(), what, " is ", b.scalar_type(),
                " ", b.sizes(), ", input ", a.scalar_type(), " ", a.sizes());
}

inline at::ScalarType summed_as(at::ScalarType type) {
    if (type == at::kComplexHalf) return at::kComplexFloat;
    return at::isReducedFloatingType(type) ? at::kFloat : type;
}

// torch adds no unsigned integers but bytes. Signed ones of the same size have sums of the same bits.
inline at::ScalarType added_as(at::ScalarType type) {
    switch (type) {
        case at::kUInt16:
            return at::kShort;
        case at::kUInt32:
            return at::kInt;
        case at::kUInt64:
            return at::kLong;
        default:
            return type;
    }
}

// Returns the sum over the ranks, in their order, so that all get the same bits; `part` selects what is
// summed.
template <class F>
Tensor sum_of(const Handles& handle, const Tensor& like, F part) {
    Tensor own = like.view(added_as(like.scalar_type()));
    auto type = summed_as(own.scalar_type());
    Tensor total = part(of_rank(handle, own, 0)).to(type, false, true);
    // Converted before it is added, because torch does not add float8.
    for (int p = 1; p < handle->get_world_size(); ++p) total.add_(part(of_rank(handle, own, p)).to(type));
    return total.to(own.scalar_type()).view(like.scalar_type());
}

inline Tensor whole(Tensor t) { return t; }

inline void one_shot(const Tensor& input, const std::string& op, const std::string& group, Tensor out) {
    check_sum(op);
    auto handle = handle_of(input, group, "input");
    handle->meet_after([&] { check_like(input, out, "out"); });
    Tensor total;
    // The sum is written after the meeting: other ranks may read where it goes.
    handle->meet_after([&] { total = sum_of(handle, input, whole); });
    out.copy_(total.view_as(out));
}

inline Tensor one_shot_all_reduce_out(const Tensor& input, std::string op, std::string group, Tensor out) {
    one_shot(input, op, group, out);
    return out;
}

inline Tensor one_shot_all_reduce(const Tensor& input, std::string op, std::string group) {
    return one_shot_all_reduce_out(input, op, group, at::empty_like(input));
}

inline Tensor one_shot_all_reduce_copy_out(const Tensor& buffer, const Tensor& local, std::string op,
                                           std::string group, Tensor out) {
    TORCH_CHECK(local.numel() <= buffer.numel() && local.scalar_type() == buffer.scalar_type(),
                "local_input does not fit in symm_buffer");
    Tensor place = buffer.flatten().narrow(0, 0, local.numel()).view_as(local);
    place.copy_(local);
    return one_shot_all_reduce_out(place, op, group, out);
}

inline Tensor one_shot_all_reduce_copy(const Tensor& buffer, const Tensor& local, std::string op,
                                       std::string group) {
    return one_shot_all_reduce_copy_out(buffer, local, op, group, at::empty_like(local));
}

// Returns the share of a flat tensor that this rank works on.
inline Tensor share(const Tensor& flat, int rank, int world) {
    int64_t begin = flat.numel() * rank / world, end = flat.numel() * (rank + 1) / world;
    return flat.narrow(0, begin, end - begin);
}

inline Tensor two_shot_all_reduce_(Tensor input, std::string op, std::string group) {
    check_sum(op);
    TORCH_CHECK(input.is_contiguous(), "input is not contiguous");
    auto handle = handle_of(input, group, "input");
    int me = handle->get_rank(), n = handle->get_world_size();
    auto mine = [&](Tensor t) { return share(t.flatten(), me, n); };
    handle->meet();
    handle->meet_after([&] {
        Tensor total = sum_of(handle, input, mine);  // no other rank reads or writes this share
        for (int p = 0; p < n; ++p) mine(of_rank(handle, input, p)).copy_(total);
    });
    return input;
}

inline Tensor two_shot_all_reduce_out(Tensor input, std::string op, std::string group, Tensor output) {
    handle_of(input, group, "input")->meet_after([&] { check_like(input, output, "output"); });
    return output.copy_(two_shot_all_reduce_(input, op, group).view_as(output));
}

inline Tensor reduce_scatter_out(Tensor input, std::string group, bool split_last_dim, Tensor output) {
    auto handle = handle_of(input, group, "input");
    int me = handle->get_rank(), n = handle->get_world_size();
    auto mine = [&](Tensor t) {
        return split_last_dim ? t.chunk(n, -1)[size_t(me)] : t.flatten().chunk(n)[size_t(me)];
    };
    handle->meet_after([&] {
        TORCH_CHECK(input.is_contiguous() && input.scalar_type() == output.scalar_type() &&
                        output.numel() * n == input.numel() && (!split_last_dim || input.size(-1) % n == 0),
                    "output ", output.sizes(), " is not one of ", n, " equal parts of input ", input.sizes());
    });
    Tensor total;
    handle->meet_after([&] { total = sum_of(handle, input, mine); });
    return output.copy_(total.contiguous().view_as(output));
}

inline Tensor one_shot_reduce_out(const Tensor& input, std::string op, int64_t root, std::string group,
                                  Tensor out) {
    check_sum(op);
    auto handle = handle_of(input, group, "input");
    handle->check_rank(root);
    bool mine = handle->get_rank() == root;
    handle->meet_after([&] {
        if (mine) check_like(input, out, "out");
    });
    Tensor total;
    handle->meet_after([&] {
        if (mine) total = sum_of(handle, input, whole);
    });
    if (total.defined()) out.copy_(total.view_as(out));
    return out;
}

inline Tensor all_gather_out(const Tensor& input, std::string group, Tensor out) {
    auto handle = handle_of(out, group, "out");
    int n = handle->get_world_size();
    handle->meet_after([&] {
        TORCH_CHECK(out.is_contiguous() && out.numel() == input.numel() * n &&
                        out.scalar_type() == input.scalar_type(),
                    "out ", out.sizes(), " does not have room for ", n, " times input ", input.sizes());
    });
    for (int p = 0; p < n; ++p) {
        of_rank(handle, out, p).flatten().chunk(n)[size_t(handle->get_rank())].copy_(input.flatten());
    }
    handle->meet();
    return out;
}

inline Tensor broadcast(Tensor input, int64_t root, std::string group) {
    auto handle = handle_of(input, group, "input");
    handle->check_rank(root);
    handle->meet();
    if (handle->get_rank() != root) input.copy_(of_rank(handle, input, int(root)));
    handle->meet();
    return input;
}

inline Tensor all_to_all(const Tensor& input, Tensor out, std::string group) {
    auto handle = handle_of(input, group, "input");
    int me = handle->get_rank(), n = handle->get_world_size();
    handle->meet_after([&] {
        check_like(input, out, "out");
        TORCH_CHECK(input.is_contiguous() && out.is_contiguous() && input.numel() % n == 0, "input ",
                    input.sizes(), " and out have to be contiguous, of ", n, " equal blocks");
    });
    for (int p = 0; p < n && input.numel(); ++p) {
        out.flatten().chunk(n)[size_t(p)].copy_(of_rank(handle, input, p).flatten().chunk(n)[size_t(me)]);
    }
    handle->meet();
    return out;
}

// Without a permutation: the block of this rank in the columns of each rank goes to rows of `out`, or the
// other way round.
inline void all_to_all_nd(const Tensor& input, Tensor out, int64_t scatter_dim, int64_t gather_dim,
                          std::string group) {
    TORCH_CHECK((scatter_dim == 1 && gather_dim == 0) || (scatter_dim == 0 && gather_dim == 1),
                "(scatter_dim, gather_dim) is (", scatter_dim, ", ", gather_dim,
                "): it has to be (1, 0) or (0, 1)");
    auto handle = handle_of(input, group, "input");
    int64_t me = handle->get_rank(), n = handle->get_world_size();
    TORCH_CHECK(
        input.is_contiguous() && (input.dim() == 3 ? input.size(scatter_dim) == n
                                                   : input.dim() == 2 && input.size(scatter_dim) % n == 0),
        "input ", input.sizes(), " has to be contiguous and, in dimension ", scatter_dim, ", ", n,
        " equal blocks");
    auto blocks = [&](const Tensor& t) {
        return input.dim() == 3 ? t : t.unflatten(scatter_dim, at::IntArrayRef{n, t.size(scatter_dim) / n});
    };
    Tensor own = blocks(input);
    // Both tensors have the ranks in one dimension; the other two dimensions keep their sizes.
    int64_t rows = own.size(scatter_dim == 1 ? 0 : 1), columns = own.size(2);
    std::vector<int64_t> deep =
        gather_dim == 0 ? std::vector<int64_t>{n, rows, columns} : std::vector<int64_t>{rows, n, columns};
    std::vector<int64_t> flat =
        gather_dim == 0 ? std::vector<int64_t>{n * rows, columns} : std::vector<int64_t>{rows, n * columns};
    handle->meet_after([&] {
        TORCH_CHECK(out.is_contiguous() && out.scalar_type() == input.scalar_type() &&
                        (out.sizes() == at::IntArrayRef(deep) || out.sizes() == at::IntArrayRef(flat)),
                    "out is ", out.scalar_type(), " ", out.sizes(), ": it has to be contiguous ",
                    input.scalar_type(), " ", at::IntArrayRef(deep), " or ", at::IntArrayRef(flat));
    });
    Tensor result = out.view(deep);
    for (int64_t p = 0; p < n; ++p) {
        result.select(gather_dim, p).copy_(blocks(of_rank(handle, input, int(p))).select(scatter_dim, me));
    }
    handle->meet();
}

// --- tiles ---

inline void check_tile(const Tensor& in, const Tensor& out) {
    TORCH_CHECK(in.dim() == 2 && in.sizes() == out.sizes() && in.scalar_type() == out.scalar_type() &&
                    in.strides() == out.strides() && in.is_floating_point(),
                "tiles have to be two-dimensional, of one floating dtype, one size and one set of strides");
}

inline void multi_root_tile_reduce(at::TensorList tiles, Tensor out, at::IntArrayRef roots, std::string group,
                                   std::string op) {
    check_sum(op);
    TORCH_CHECK(!tiles.empty() && tiles.size() == roots.size(), tiles.size(), " tiles for ", roots.size(),
                " roots");
    auto handle = handle_of(tiles[0], group, "in_tile");
    std::vector<bool> seen(size_t(handle->get_world_size()));
    std::vector<Handles> handles;
    handle->meet_after([&] {
        // All ranks take the handles of all tiles, because a rendezvous is collective.
        for (auto& tile : tiles) handles.push_back(handle_of(tile, group, "in_tile"));
        for (size_t i = 0; i < tiles.size(); ++i) {
            check_tile(tiles[i], out);
            handle->check_rank(roots[i]);
            TORCH_CHECK(!seen[size_t(roots[i])], "rank ", roots[i], " is the root of two tiles");
            seen[size_t(roots[i])] = true;
        }
    });
    Tensor total;
    handle->meet_after([&] {
        for (size_t i = 0; i < tiles.size(); ++i) {
            if (roots[i] == handle->get_rank()) total = sum_of(handles[i], tiles[i], whole);
        }
    });
    if (total.defined()) out.copy_(total);
}

inline void tile_reduce(const Tensor& tile, Tensor out, int64_t root, std::string group, std::string op) {
    multi_root_tile_reduce({tile}, out, {root}, group, op);
}

inline void reduce_scatter_offset(const Tensor& input, at::TensorList outs, std::string group, int64_t dim,
                                  at::OptionalIntArrayRef offsets, at::OptionalIntArrayRef roots,
                                  std::string op) {
    check_sum(op);
    auto handle = handle_of(input, group, "input");
    int64_t n = handle->get_world_size();
    TORCH_CHECK(input.dim() == 2 && input.stride(1) == 1 && (dim == 0 || dim == 1),
                "input has to have two dimensions, of which the last is contiguous, and dim to be 0 or 1");
    int64_t size = input.size(dim);
    std::vector<int64_t> ends = offsets ? offsets->vec() : std::vector<int64_t>{};
    TORCH_CHECK(offsets || size % n == 0, "without offsets ", size, " has to be ", n, " equal blocks");
    for (int64_t i = 1; !offsets && i <= n; ++i) ends.push_back(size / n * i);
    TORCH_CHECK(!roots || roots->size() == ends.size(), ends.size(), " blocks for ", roots->size(),
                " dst_ranks");
    std::vector<std::pair<int64_t, int64_t>> mine;
    int64_t begin = 0;
    for (size_t i = 0; i < ends.size(); begin = ends[i++]) {
        int64_t root = roots ? (*roots)[i] : int64_t(i) % n;
        handle->check_rank(root);
        TORCH_CHECK(ends[i] >= begin && ends[i] <= size, "offsets have to grow, up to ", size);
        if (root == handle->get_rank()) mine.emplace_back(begin, ends[i] - begin);
    }
    handle->meet_after([&] {
        TORCH_CHECK(mine.size() == outs.size(), "this rank owns ", mine.size(), " blocks, out has ",
                    outs.size());
        for (size_t i = 0; i < mine.size(); ++i) {
            TORCH_CHECK(outs[i].sizes() == input.narrow(dim, mine[i].first, mine[i].second).sizes(), "out[",
                        i, "] is ", outs[i].sizes());
        }
    });
    handle->meet_after([&] {
        for (size_t i = 0; i < mine.size(); ++i) {
            auto cut = [&](Tensor t) { return t.narrow(dim, mine[i].first, mine[i].second); };
            Tensor(outs[i]).copy_(sum_of(handle, input, cut));
        }
    });
}

}  // namespace unicomm_torch
