// The entries of a torch flight recorder dump as columns: one number per entry and field. Texts, shapes and
// call stacks are interned, so that Python objects are created once per distinct value, not once per entry.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "recorder/pickle.hpp"

namespace unicomm::pickle {

// Interns sequences of numbers: equal sequences get the same number.
class Sequences {
  public:
    Sequences();
    uint32_t intern(std::span<const uint64_t> sequence);
    std::span<const uint64_t> operator[](uint32_t id) const {
        return {pool_.data() + begins_[id], begins_[id + 1] - begins_[id]};
    }
    uint32_t size() const { return static_cast<uint32_t>(begins_.size() - 1); }
    void clear();

  private:
    Vector<uint64_t> pool_, begins_;
    Vector<uint32_t> hashes_, slots_;  // a slot is 1 + number, 0: free
};

// Numbers of the texts that are field names, which the reader interns first.
enum Field : uint32_t {
    kRecordId,
    kPgId,
    kProcessGroup,
    kCollectiveSeqId,
    kP2pSeqId,
    kOpId,
    kProfilingName,
    kTimeCreated,
    kTimeStarted,
    kTimeCompleted,
    kDuration,
    kInputSizes,
    kOutputSizes,
    kInputDtypes,
    kOutputDtypes,
    kState,
    kRetired,
    kTimeoutMs,
    kIsP2p,
    kFrames,
    kThreadId,
    kAsync,
    kGraph,
    kInputChecksum,
    kOutputChecksum,
    kCompared,
    kFields,  // the fields of an entry end here
    kEntries = kFields,
    kPgConfig,
    kName,
    kFilename,
    kLine,
    kEmptyText,
    kKnownTexts,
};

class DumpReader {
  public:
    // Reads a dump. A field of the wrong type counts as missing. Throws `Refused` if `data` is no dump,
    // `std::bad_alloc` if it needs more than `account` allows. `data` must stay valid as long as texts are
    // read.
    void read(std::string_view data);
    void clear();

    Reader tree;
    Value top;  // the dump: always a dict
    uint64_t rows = 0;

    Vector<int64_t> record_id, pg_id, collective_seq_id, p2p_seq_id, op_id, time_created, time_started,
        time_completed, timeout_ms, graph, flags;  // flags: those of ring.hpp that concern checksums
    Vector<uint64_t> input_checksum, output_checksum;
    Vector<double> duration_ms;
    Vector<uint8_t> retired, is_p2p, is_async;
    bool has_async = false, has_graph = false, has_checksums = false;  // whether any entry has that field
    // Indices into `groups`, `stacks`, `shapes` and `text_lists`, and through `names`, `states` and `threads`
    // into texts.
    Vector<int32_t> group, frames, input_sizes, output_sizes, input_dtypes, output_dtypes, profiling_name,
        state, thread;

    Sequences groups;      // (name, description), as texts
    Sequences dims;        // sizes of one tensor
    Sequences shapes;      // sizes of all tensors: indices into `dims`
    Sequences text_lists;  // texts
    Sequences places;      // call sites: function, file, line
    Sequences stacks;      // call stacks: indices into `places`

    // The distinct texts of one column, numbered in order of appearance.
    class Column {
      public:
        int32_t number(uint32_t text);
        const Vector<uint32_t>& texts() const { return texts_; }
        void clear();

      private:
        Vector<uint32_t> texts_;
        Vector<int32_t> numbers_;  // by text: 1 + number, 0 if none
    };
    Column names, states, threads;

  private:
    void add(const Value& entry);
    void spend(const Value& container);
    int64_t integer(const Value& v) const;
    std::optional<uint64_t> checksum(const Value& v) const;
    bool truth(const Value& v) const;
    double real(const Value& v) const;
    uint32_t text(const Value& v);
    int32_t group_of(const Value& v);
    uint32_t dims_of(const Value& v);
    int32_t sizes_of(const Value& v);
    int32_t texts_of(const Value& v);
    int32_t frames_of(const Value& v);
    uint64_t place_of(const Value& v);
    template <class F>
    int32_t once(const Value& container, uint32_t role, F&& make);

    template <class F>
    void for_each_column(F&& f);

    Vector<uint64_t> scratch_;
    uint64_t budget_ = 0;  // items that may still be read
};

}  // namespace unicomm::pickle
