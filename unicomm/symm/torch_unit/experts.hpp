// Exchanges whose splits are in symmetric memory, too. Units are rows of the first dimension. Row 0 of a
// splits_offsets tensor has the splits, row 1 the offsets.
#pragma once
#include "kernels.hpp"

namespace unicomm_torch {

class Rows {
  public:
    Rows(const Tensor& input, const Tensor& out, const Tensor& splits, const Tensor& results,
         const std::string& group, bool splits_fit)
        : input_(input),
          out_(out),
          splits_(splits),
          results_(results),
          handle_(handle_of(input, group, "input")),
          splits_handle_(handle_of(splits, group, "in_splits")),
          n(handle_->get_world_size()),
          me(handle_->get_rank()) {
        handle_->meet_after([&] {
            TORCH_CHECK(input.is_contiguous() && out.is_contiguous() && splits.is_contiguous() &&
                            results.is_contiguous(),
                        "all tensors have to be contiguous");
            TORCH_CHECK(splits.scalar_type() == at::kLong && results.scalar_type() == at::kLong,
                        "splits and offsets have to be int64");
            TORCH_CHECK(input.dim() && input.dim() == out.dim() && input.scalar_type() == out.scalar_type() &&
                            input.sizes().slice(1) == out.sizes().slice(1),
                        "input ", input.sizes(), " and out ", out.sizes(), " have other rows");
            count = results.numel() / 2;
            TORCH_CHECK(results.dim() == 2 && results.size(0) == 2 && count % n == 0,
                        "out_splits_offsets is ", results.sizes(), ": it has to be [2, k], k a multiple of ",
                        n, " ranks");
            TORCH_CHECK(splits_fit, "the splits are ", splits.sizes(), ", out_splits_offsets ",
                        results.sizes());
            handle_->told_by(me)[0] = input.size(0), handle_->told_by(me)[1] = out.size(0);
        });
        experts = count / n;
        for (int p = 0; p < n; ++p) {
            rows_in_.push_back(handle_->told_by(p)[0]), rows_out_.push_back(handle_->told_by(p)[1]);
            numbers_.push_back(of_rank(splits_handle_, splits_, p).const_data_ptr<int64_t>());
        }
    }

    const int64_t* said(int rank) const { return numbers_[size_t(rank)]; }
    const Tensor& splits() const { return splits_; }

    // All ranks check the same numbers, so all of them raise the error, before anything is written.
    void refuse_unless(bool good, const std::string& why) {
        if (good) return;
        handle_->meet();
        TORCH_CHECK(false, why);
    }

    void check_sent(int from, int64_t begin, int64_t rows) {
        const int64_t most = rows_in_[size_t(from)];
        refuse_unless(rows == 0 || (rows > 0 && rows <= most && begin >= 0 && begin <= most - rows),
                      "the splits of rank " + std::to_string(from) + " go beyond the " +
                          std::to_string(most) + " rows of input, or are negative");
    }

    void check_room(int rank, int64_t end) {
        const int64_t most = rows_out_[size_t(rank)];
        refuse_unless(end <= most, "rank " + std::to_string(rank) + " would receive into row " +
                                       std::to_string(end) + " of an out of " + std::to_string(most) +
                                       " rows; nothing was written");
    }

    void take(int64_t index, int from, int64_t source, int64_t rows, int64_t to) {
        auto* results = results_.mutable_data_ptr<int64_t>();
        results[index] = rows, results[count + index] = to;
        if (rows) moves_.push_back({from, source, rows, to});
    }

    void finish() {
        size_t row = size_t(c10::multiply_integers(input_.sizes().slice(1))) * input_.itemsize();
        auto* out = static_cast<char*>(out_.mutable_data_ptr());
        for (auto& m : moves_) {
            const char* in = address_of(handle_, input_, m.from);  // a tensor of no rows has no address
            std::memcpy(out + size_t(m.to) * row, in + size_t(m.source) * row, size_t(m.rows) * row);
        }
        handle_->meet();
    }

  private:
    struct Move {
        int from;
        int64_t source, rows, to;
    };
    Tensor input_, out_, splits_, results_;
    Handles handle_, splits_handle_;
    std::vector<int64_t> rows_in_, rows_out_;  // of each rank
    std::vector<const int64_t*> numbers_;
    std::vector<Move> moves_;

  public:
    int n, me;
    int64_t count = 0, experts = 0;
};

// `align` 0: dense blocks by rank, for one expert per rank.
inline void dispatch(const Tensor& input, Tensor out, const Tensor& splits, Tensor results,
                     const std::string& group, int64_t align) {
    Rows rows(input, out, splits, results, group, splits.numel() * 2 == results.numel());
    int64_t e = rows.experts;
    for (int from = 0; from < rows.n; ++from) {
        int64_t sum = 0;
        for (int64_t k = 0; k < rows.count; ++k) {
            rows.check_sent(from, sum, rows.said(from)[k]);
            sum += rows.said(from)[k];
        }
    }
    // Computes where the block of each expert of a rank begins; returns the end of the last row.
    auto blocks = [&](int to, std::vector<int64_t>& starts) {
        int64_t at = 0, end = 0;
        for (int64_t x = 0; x < e; ++x) {
            int64_t came = 0;
            for (int p = 0; p < rows.n; ++p) came += rows.said(p)[to * e + x];
            starts.push_back(at);
            if (came) end = at + came;
            at += align ? std::max((came + align - 1) / align, int64_t(1)) * align : came;
        }
        return end;
    };
    for (int to = 0; to < rows.n; ++to) {
        std::vector<int64_t> starts;
        rows.check_room(to, blocks(to, starts));
    }
    std::vector<int64_t> starts;
    blocks(rows.me, starts);
    for (int p = 0; p < rows.n; ++p) {
        int64_t source = 0;
        for (int64_t k = 0; k < rows.me * e; ++k) source += rows.said(p)[k];
        for (int64_t x = 0; x < e; ++x) {
            int64_t sent = rows.said(p)[rows.me * e + x];
            rows.take(x * rows.n + p, p, source, sent, starts[size_t(x)]);
            starts[size_t(x)] += sent;
            source += sent;
        }
    }
    rows.finish();
}

inline void all_to_all_vdev(const Tensor& input, Tensor out, const Tensor& splits, Tensor results,
                            std::string group) {
    dispatch(input, out, splits, results, group, 0);
}

inline void all_to_all_vdev_2d(const Tensor& input, Tensor out, const Tensor& splits, Tensor results,
                               std::string group, std::optional<int64_t> align) {
    TORCH_CHECK(align.value_or(1) > 0, "major_align=", align.value_or(1), ": it has to be 1 or more");
    dispatch(input, out, splits, results, group, align.value_or(1));
}

inline void all_to_all_vdev_2d_offset(const Tensor& input, Tensor out, const Tensor& splits, Tensor results,
                                      std::string group) {
    Rows rows(input, out, splits, results, group, splits.sizes() == results.sizes());
    int64_t e = rows.experts;
    for (int from = 0; from < rows.n; ++from) {
        const int64_t* said = rows.said(from);
        for (int64_t k = 0; k < rows.count; ++k)
            rows.check_sent(from, said[k] ? said[rows.count + k] : 0, said[k]);
    }
    for (int to = 0; to < rows.n; ++to) {
        int64_t sum = 0;
        for (int p = 0; p < rows.n; ++p) {
            for (int64_t x = 0; x < e; ++x) sum += rows.said(p)[x * rows.n + to];
        }
        rows.check_room(to, sum);
    }
    int64_t at = 0;
    for (int p = 0; p < rows.n; ++p) {
        for (int64_t x = 0; x < e; ++x) {
            int64_t k = x * rows.n + rows.me, sent = rows.said(p)[k];
            rows.take(p * e + x, p, rows.said(p)[rows.count + k], sent, at);
            at += sent;
        }
    }
    rows.finish();
}

}  // namespace unicomm_torch
