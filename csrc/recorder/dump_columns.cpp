// Turns the entries of a dump into columns.
#include "recorder/dump_columns.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "recorder/ring.hpp"

namespace unicomm::pickle {
namespace {

constexpr uint64_t kRow = 512;  // bytes of an entry in numpy's columns, and in what is made of them

// What a container was converted to, in `Container::role`.
enum Role : uint32_t { kUnused, kDims, kShape, kTextList, kPlace, kStack, kGroup };

// In the order of `Field`.
constexpr const char* kKnown[kKnownTexts] = {
    "record_id",
    "pg_id",
    "process_group",
    "collective_seq_id",
    "p2p_seq_id",
    "op_id",
    "profiling_name",
    "time_created_ns",
    "time_discovered_started_ns",
    "time_discovered_completed_ns",
    "duration_ms",
    "input_sizes",
    "output_sizes",
    "input_dtypes",
    "output_dtypes",
    "state",
    "retired",
    "timeout_ms",
    "is_p2p",
    "frames",
    "thread_id",
    "unicomm_async",
    "unicomm_graph",
    "unicomm_input_checksum",
    "unicomm_output_checksum",
    "unicomm_compared",
    "entries",
    "pg_config",
    "name",
    "filename",
    "line",
    "",
};

uint32_t hash_of(std::span<const uint64_t> sequence) {
    uint64_t h = 0x9e3779b97f4a7c15ull ^ sequence.size();
    for (uint64_t v : sequence) {
        h = (h ^ v) * 0xff51afd7ed558ccdull;
        h ^= h >> 32;
    }
    return static_cast<uint32_t>(h);
}

bool is_sequence(const Value& v) { return v.kind == Kind::kList || v.kind == Kind::kTuple; }

}  // namespace

Sequences::Sequences() : begins_{0}, slots_(64) {}

void Sequences::clear() {
    pool_.clear();
    begins_.assign(1, 0);
    hashes_.clear();
    slots_.assign(64, 0);
}

uint32_t Sequences::intern(std::span<const uint64_t> sequence) {
    uint32_t hash = hash_of(sequence);
    size_t mask = slots_.size() - 1, at = hash & mask;
    for (; slots_[at]; at = (at + 1) & mask) {
        uint32_t id = slots_[at] - 1;
        if (hashes_[id] == hash && std::ranges::equal((*this)[id], sequence)) return id;
    }
    uint32_t id = size();
    pool_.insert(pool_.end(), sequence.begin(), sequence.end());
    begins_.push_back(pool_.size());
    hashes_.push_back(hash);
    slots_[at] = id + 1;
    if (size_t{size()} * 2 > slots_.size()) {
        Vector<uint32_t> slots(slots_.size() * 2);
        for (uint32_t i = 0; i < size(); ++i) {
            size_t to = hashes_[i] & (slots.size() - 1);
            while (slots[to]) to = (to + 1) & (slots.size() - 1);
            slots[to] = i + 1;
        }
        slots_.swap(slots);
    }
    return id;
}

int32_t DumpReader::Column::number(uint32_t text) {
    if (text >= numbers_.size()) numbers_.resize(text + 1);
    int32_t& number = numbers_[text];
    if (!number) {
        texts_.push_back(text);
        number = static_cast<int32_t>(texts_.size());
    }
    return number - 1;
}

void DumpReader::Column::clear() {
    texts_.clear();
    numbers_.clear();
}

template <class F>
void DumpReader::for_each_column(F&& f) {
    for (auto* c : {&record_id, &pg_id, &collective_seq_id, &p2p_seq_id, &op_id, &time_created, &time_started,
                    &time_completed, &timeout_ms, &graph, &flags})
        f(*c);
    for (auto* c : {&retired, &is_p2p, &is_async}) f(*c);
    for (auto* c : {&input_checksum, &output_checksum}) f(*c);
    for (auto* c : {&group, &frames, &input_sizes, &output_sizes, &input_dtypes, &output_dtypes,
                    &profiling_name, &state, &thread})
        f(*c);
    f(duration_ms);
}

void DumpReader::clear() {
    tree.clear();
    top = {};
    rows = 0;
    has_async = has_graph = has_checksums = false;
    for_each_column([](auto& column) { column.clear(); });
    for (auto* s : {&groups, &dims, &shapes, &text_lists, &places, &stacks}) s->clear();
    for (auto* c : {&names, &states, &threads}) c->clear();
}

void DumpReader::read(std::string_view data) {
    clear();
    for (const char* name : kKnown) tree.texts.intern(name);
    top = tree.parse(data);
    Value entries, config;
    if (top.kind == Kind::kDict)
        tree.for_each_stretch(top, [&](std::span<const Value> items) {
            for (size_t i = 0; i + 1 < items.size(); i += 2) {
                if (items[i].kind != Kind::kText) continue;
                if (items[i].index == kEntries) entries = items[i + 1];
                if (items[i].index == kPgConfig) config = items[i + 1];
            }
        });
    if (entries.kind == Kind::kNone && config.kind == Kind::kNone)
        throw Refused("no dump of a flight recorder: it has neither 'entries' nor 'pg_config'");
    if (entries.kind == Kind::kNone) return;
    if (entries.kind != Kind::kList)
        throw Refused(std::string("'entries' is ") + name_of(entries.kind) + ", not a list");
    size_t n = tree.count(entries);
    account.make(n * kRow);
    for_each_column([n](auto& column) { column.reserve(n); });
    budget_ = data.size() * 64 + (1 << 20);
    tree.for_each_stretch(entries, [&](std::span<const Value> items) {
        for (const Value& entry : items) {
            if (entry.kind != Kind::kDict)
                throw Refused("entry " + std::to_string(rows) + " is " + name_of(entry.kind) +
                              ", not a dict");
            spend(entry);
            add(entry);
            ++rows;
        }
    });
}

template <class F>
int32_t DumpReader::once(const Value& container, uint32_t role, F&& make) {
    Container& c = tree.containers[container.index];
    if (c.role != role) {
        spend(container);
        c.meaning = make();
        c.role = role;
    }
    return static_cast<int32_t>(c.meaning);
}

// Bounds the work: a few bytes of input can refer to one large container again and again.
void DumpReader::spend(const Value& container) {
    size_t n = tree.count(container);
    if (n > budget_) throw Refused("the same large container is used too often");
    budget_ -= n;
}

int64_t DumpReader::integer(const Value& v) const {
    constexpr double kLimit = 9223372036854775808.0;
    constexpr auto kMin = std::numeric_limits<int64_t>::min(), kMax = std::numeric_limits<int64_t>::max();
    switch (v.kind) {
        case Kind::kInt:
        case Kind::kBool:
            return v.integer;
        case Kind::kBigInt:
            return (v.decimal ? v.data[0] == '-' : (v.data[v.length - 1] & 0x80) != 0) ? kMin : kMax;
        case Kind::kFloat:
            if (v.real >= kLimit) return kMax;
            if (v.real <= -kLimit) return kMin;
            return std::isnan(v.real) ? 0 : static_cast<int64_t>(v.real);
        case Kind::kText: {
            std::string_view text = tree.texts[static_cast<uint32_t>(v.index)];
            int64_t number = 0;
            auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), number);
            return code == std::errc() && end == text.data() + text.size() ? number : 0;
        }
        default:
            return 0;
    }
}

// A checksum is a text of 16 hexadecimal digits.
std::optional<uint64_t> DumpReader::checksum(const Value& v) const {
    if (v.kind != Kind::kText) return std::nullopt;
    std::string_view text = tree.texts[static_cast<uint32_t>(v.index)];
    uint64_t number = 0;
    auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), number, 16);
    bool whole = text.size() == 16 && code == std::errc() && end == text.data() + text.size();
    return whole ? std::optional(number) : std::nullopt;
}

bool DumpReader::truth(const Value& v) const {
    switch (v.kind) {
        case Kind::kNone:
            return false;
        case Kind::kFloat:
            return v.real != 0;
        case Kind::kText:
            return v.index != kEmptyText;
        case Kind::kBytes:
            return v.length != 0;
        case Kind::kBigInt:
            return true;
        default:
            return v.is_container() ? tree.count(v) != 0 : v.integer != 0;
    }
}

double DumpReader::real(const Value& v) const {
    constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
    if (v.kind == Kind::kInt || v.kind == Kind::kBool) return static_cast<double>(v.integer);
    return v.kind == Kind::kFloat && std::fabs(v.real) < 1e300 ? v.real : kNone;
}

uint32_t DumpReader::text(const Value& v) {
    if (v.kind == Kind::kText) return static_cast<uint32_t>(v.index);
    return v.kind == Kind::kInt ? tree.texts.intern_copy(std::to_string(v.integer)) : kEmptyText;
}

int32_t DumpReader::group_of(const Value& v) {
    uint64_t pair[2] = {kEmptyText, kEmptyText};
    if (v.kind == Kind::kText) pair[0] = v.index;
    if (!is_sequence(v)) return static_cast<int32_t>(groups.intern(pair));
    return once(v, kGroup, [&] {
        size_t n = 0;
        tree.for_each_stretch(v, [&](std::span<const Value> items) {
            for (size_t i = 0; i < items.size() && n < 2; ++i) pair[n++] = text(items[i]);
        });
        return groups.intern(pair);
    });
}

uint32_t DumpReader::dims_of(const Value& v) {
    return static_cast<uint32_t>(once(v, kDims, [&] {
        size_t from = scratch_.size();
        tree.for_each_stretch(v, [&](std::span<const Value> items) {
            for (const Value& item : items) scratch_.push_back(static_cast<uint64_t>(integer(item)));
        });
        uint32_t made = dims.intern(std::span(scratch_).subspan(from));
        scratch_.resize(from);
        return made;
    }));
}

int32_t DumpReader::sizes_of(const Value& v) {
    if (!is_sequence(v)) return static_cast<int32_t>(shapes.intern({}));
    return once(v, kShape, [&] {
        scratch_.clear();
        size_t numbers = 0, all = 0;
        tree.for_each_stretch(v, [&](std::span<const Value> items) {
            all += items.size();
            for (const Value& item : items) {
                numbers += item.kind == Kind::kInt || item.kind == Kind::kBool || item.kind == Kind::kBigInt;
                if (is_sequence(item)) {
                    uint64_t id = dims_of(item);  // also uses `scratch_`
                    scratch_.push_back(id);
                }
            }
        });
        if (all && numbers == all) scratch_.assign(1, dims_of(v));  // one shape, not a list
        return shapes.intern(scratch_);
    });
}

int32_t DumpReader::texts_of(const Value& v) {
    const uint64_t one = v.index;
    if (v.kind == Kind::kText && one != kEmptyText) return static_cast<int32_t>(text_lists.intern({&one, 1}));
    if (!is_sequence(v)) return static_cast<int32_t>(text_lists.intern({}));
    return once(v, kTextList, [&] {
        scratch_.clear();
        tree.for_each_stretch(v, [&](std::span<const Value> items) {
            for (const Value& item : items) scratch_.push_back(text(item));
        });
        return text_lists.intern(scratch_);
    });
}

uint64_t DumpReader::place_of(const Value& v) {
    return static_cast<uint64_t>(once(v, kPlace, [&] {
        uint64_t place[3] = {kEmptyText, kEmptyText, 0};
        tree.for_each_stretch(v, [&](std::span<const Value> items) {
            for (size_t i = 0; i + 1 < items.size(); i += 2) {
                if (items[i].kind != Kind::kText) continue;
                const Value& value = items[i + 1];
                if (items[i].index == kName) place[0] = text(value);
                if (items[i].index == kFilename) place[1] = text(value);
                if (items[i].index == kLine) place[2] = static_cast<uint64_t>(integer(value));
            }
        });
        return places.intern(place);
    }));
}

int32_t DumpReader::frames_of(const Value& v) {
    if (!is_sequence(v)) return static_cast<int32_t>(stacks.intern({}));
    return once(v, kStack, [&] {
        scratch_.clear();
        tree.for_each_stretch(v, [&](std::span<const Value> items) {
            for (const Value& item : items)
                if (item.kind == Kind::kDict) scratch_.push_back(place_of(item));
        });
        return stacks.intern(scratch_);
    });
}

void DumpReader::add(const Value& entry) {
    Value fields[kFields];
    tree.for_each_stretch(entry, [&](std::span<const Value> items) {
        for (size_t i = 0; i + 1 < items.size(); i += 2) {
            if (items[i].kind != Kind::kText || items[i].index >= kFields) continue;
            fields[items[i].index] = items[i + 1];
            has_async |= items[i].index == kAsync;
            has_graph |= items[i].index == kGraph;
            has_checksums |= items[i].index == kInputChecksum || items[i].index == kOutputChecksum;
        }
    });
    record_id.push_back(integer(fields[kRecordId]));
    pg_id.push_back(integer(fields[kPgId]));
    collective_seq_id.push_back(integer(fields[kCollectiveSeqId]));
    p2p_seq_id.push_back(integer(fields[kP2pSeqId]));
    op_id.push_back(integer(fields[kOpId]));
    time_created.push_back(integer(fields[kTimeCreated]));
    time_started.push_back(integer(fields[kTimeStarted]));
    time_completed.push_back(integer(fields[kTimeCompleted]));
    timeout_ms.push_back(integer(fields[kTimeoutMs]));
    duration_ms.push_back(real(fields[kDuration]));
    retired.push_back(truth(fields[kRetired]));
    is_p2p.push_back(truth(fields[kIsP2p]));
    is_async.push_back(truth(fields[kAsync]));
    graph.push_back(integer(fields[kGraph]));
    auto in = checksum(fields[kInputChecksum]), out = checksum(fields[kOutputChecksum]);
    input_checksum.push_back(in.value_or(0));
    output_checksum.push_back(out.value_or(0));
    flags.push_back((in ? ring::kInputChecksum : 0) | (out ? ring::kOutputChecksum : 0) |
                    (truth(fields[kCompared]) ? ring::kCompared : 0));
    group.push_back(group_of(fields[kProcessGroup]));
    profiling_name.push_back(names.number(text(fields[kProfilingName])));
    state.push_back(states.number(text(fields[kState])));
    thread.push_back(threads.number(text(fields[kThreadId])));
    input_sizes.push_back(sizes_of(fields[kInputSizes]));
    output_sizes.push_back(sizes_of(fields[kOutputSizes]));
    input_dtypes.push_back(texts_of(fields[kInputDtypes]));
    output_dtypes.push_back(texts_of(fields[kOutputDtypes]));
    frames.push_back(frames_of(fields[kFrames]));
}

}  // namespace unicomm::pickle
