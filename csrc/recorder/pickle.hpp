// Reads the part of pickle that holds plain data: dicts, lists, tuples, numbers, texts, bytes, None and
// booleans, in protocols 0 to 5. Nothing is executed: opcodes that name or call anything are refused. Every
// length is checked against the input, nothing recurses, and memory is counted and bounded: a byte can stand
// for hundreds in memory.
//
// Texts are interned and containers are numbered: a value that pickle's memo shares is shared here, too.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace unicomm::pickle {

// What the reader of one thread needs: its vectors, and what is made of them for Python.
class Account {
  public:
    // Begins a dump, which may need `most` bytes. Vectors that are kept from the one before count, too.
    void begin(uint64_t most) {
        most_ = most;
        made_ = 0;
    }
    // Counts bytes until the next `begin`. Throws `std::bad_alloc` when they are too many.
    void make(uint64_t bytes) {
        check(bytes);
        made_ += bytes;
    }
    void hold(uint64_t bytes) {
        check(bytes);
        held_ += bytes;
    }
    void release(uint64_t bytes) { held_ -= bytes; }
    uint64_t held() const { return held_; }

  private:
    void check(uint64_t bytes) const {
        if (bytes > most_ || held_ + made_ > most_ - bytes) throw std::bad_alloc();
    }
    uint64_t most_ = UINT64_MAX, held_ = 0, made_ = 0;
};

inline constinit thread_local Account account;

// The allocator of the reader's vectors. A reader stays in the thread that made it.
template <class T>
struct Counted {
    using value_type = T;
    Counted() = default;
    template <class U>
    Counted(const Counted<U>&) {}
    T* allocate(size_t n) {
        account.hold(n * sizeof(T));
        try {
            return std::allocator<T>().allocate(n);
        } catch (...) {
            account.release(n * sizeof(T));
            throw;
        }
    }
    void deallocate(T* p, size_t n) noexcept {
        std::allocator<T>().deallocate(p, n);
        account.release(n * sizeof(T));
    }
    friend bool operator==(const Counted&, const Counted&) { return true; }
};

template <class T>
using Vector = std::vector<T, Counted<T>>;

// The input is no pickle, is damaged, or holds more than plain data.
struct Refused : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

enum class Kind : uint8_t { kNone, kBool, kInt, kBigInt, kFloat, kText, kBytes, kList, kTuple, kDict };
const char* name_of(Kind kind);

struct Value {
    Kind kind = Kind::kNone;
    bool decimal = false;  // a big number: decimal digits instead of little-endian bytes
    uint32_t length = 0;   // for bytes and big numbers
    union {
        int64_t integer = 0;
        double real;
        const char* data;  // bytes and big numbers: a place in the input
        uint64_t index;    // texts and containers
    };
    bool is_container() const { return kind >= Kind::kList; }
};

// Interns texts: equal texts get the same number.
class Texts {
  public:
    Texts();
    uint32_t intern(std::string_view text);  // the text must outlive the table
    uint32_t intern_copy(std::string text);
    std::string_view operator[](uint32_t id) const { return texts_[id]; }
    void clear();

  private:
    void grow();
    Vector<std::string_view> texts_;
    Vector<uint32_t> hashes_;
    Vector<uint32_t> slots_;  // 1 + number; 0: free
    std::deque<std::string> owned_;
};

struct Container {
    static constexpr uint32_t kNoChunk = UINT32_MAX;
    uint32_t first = kNoChunk, last = kNoChunk;
    uint32_t role = 0, meaning = 0;  // for users of the tree: what this was converted to
};

class Reader {
  public:
    Reader() = default;
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;

    // Parses one pickle. `data` must stay valid as long as the values are used. Throws `Refused`. Texts
    // interned beforehand keep their numbers.
    Value parse(std::string_view data);
    // Forgets everything. The memory stays for the next input.
    void clear();

    Texts texts;
    Vector<Container> containers;

    // Calls f(items) for each contiguous run of a container's items, in order. The items of a dict are key,
    // value, key, value ...
    template <class F>
    void for_each_stretch(const Value& container, F&& f) const {
        for (uint32_t at = containers[container.index].first; at != Container::kNoChunk;) {
            const Chunk& chunk = chunks_[at];
            at = chunk.next;
            f(std::span<const Value>(items_.data() + chunk.begin, chunk.count));
        }
    }
    size_t count(const Value& container) const;

  private:
    struct Chunk {
        uint32_t begin, count, next;
    };

    [[noreturn]] void refuse(const std::string& why) const;
    const char* take(uint64_t n);
    std::string_view line();
    template <class T>
    T little();
    void push(const Value& v) { stack_.push_back(v); }
    void push_text(uint64_t length);
    void push_escaped(std::string_view text);
    void push_bytes(uint64_t length);
    void push_little_endian(uint64_t length);
    void push_decimal(std::string_view digits);
    void push_new(Kind kind, size_t from);
    void extend(const Value& container, size_t from);
    void add_to(Kind kind, size_t from);
    size_t pop_mark();
    size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
    size_t need(size_t n) const;
    void put(uint64_t at);
    void get(uint64_t at);
    uint64_t number(std::string_view digits) const;

    Vector<Value> stack_, memo_, items_;
    Vector<uint32_t> marks_;
    Vector<Chunk> chunks_;
    const char* begin_ = nullptr;
    const char* at_ = nullptr;
    const char* end_ = nullptr;
    const char* opcode_ = nullptr;
    uint64_t memoized_ = 0;
};

}  // namespace unicomm::pickle
