// Fibers, virtual time, switches, and the ends and stops of processes.
#include "tests/simulation/scheduler.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace unicomm::simulation {
namespace {

constexpr uint64_t kNever = ~uint64_t{0};
constexpr uint64_t kPointNs = 20;  // how long the step between two points lasts
constexpr size_t kStack = 256 * 1024;

// The stacks of all runs. A fiber that never returned leaves what was on its stack.
char* stack_of(int fiber) {
    static char* stacks = [] {
        void* mem = mmap(nullptr, kFibers * kStack, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (mem == MAP_FAILED) std::abort();
        return static_cast<char*>(mem);
    }();
    return stacks + size_t(fiber) * kStack;
}

}  // namespace

uint64_t points_left = kNever;
Scheduler* Scheduler::current_ = nullptr;

Scheduler::Scheduler(Settings settings)
    : settings_(std::move(settings)), rng_(settings_.seed), happened_(settings_.events.size()) {
    for (const Switch& s : settings_.switches) fibers_[s.fiber].switch_at[s.point] = s.to;
    for (size_t i = 0; i < settings_.events.size(); ++i) {
        const Event& e = settings_.events[i];
        fibers_[e.process].events_at[e.point].push_back(i);
    }
    clock_ = 1000 * kMs;
    current_ = this;
}

Scheduler::~Scheduler() { current_ = nullptr; }

void Scheduler::tell(Told told, bool each_point, std::function<std::string(int)> doing) {
    told_ = std::move(told);
    each_point_ = each_point;
    doing_ = std::move(doing);
}

void Scheduler::add(int fiber, std::function<void()> body) {
    fibers_[fiber].body = std::move(body);
    fibers_[fiber].state = fiber < kProcesses ? State::kReady : State::kWaitsForStart;
}

uint64_t Scheduler::now() const { return clock_ + (running_ < 0 ? 0 : (armed_ - points_left) * kPointNs); }

void Scheduler::settle() {
    uint64_t passed = armed_ - points_left;
    fibers_[running_].points += passed;
    total_ += passed;
    stretch_ += passed;
    clock_ += passed * kPointNs;
    armed_ = points_left;
}

void Scheduler::arm() {
    Fiber& f = fibers_[running_];
    uint64_t next = f.points + 100000;  // looks at the bounds of the run now and then
    if (settings_.gap > 0) {
        if (f.next_random <= f.points) {
            std::exponential_distribution<double> gap(1 / settings_.gap);
            f.next_random = f.points + 1 + uint64_t(gap(rng_));
        }
        next = std::min(next, f.next_random);
    }
    if (auto at = f.switch_at.upper_bound(f.points); at != f.switch_at.end())
        next = std::min(next, at->first);
    if (auto at = f.events_at.upper_bound(f.points); at != f.events_at.end())
        next = std::min(next, at->first);
    if (each_point_) next = f.points + 1;
    armed_ = points_left = next - f.points;
}

bool Scheduler::can_run(int fiber) const {
    const Fiber& f = fibers_[fiber];
    const Process& p = processes_[fiber % kProcesses];
    if (p.ended || p.stopped_until > clock_) return false;
    return f.state == State::kReady || (f.state == State::kSleeps && f.until <= clock_);
}

int Scheduler::next_after(int fiber) {
    for (int i = 1; i <= kFibers; ++i) {
        int other = (fiber + i + kFibers) % kFibers;
        if (can_run(other)) return other;
    }
    return -1;
}

int Scheduler::random_other(int fiber) {
    int able[kFibers], count = 0;
    for (int other = 0; other < kFibers; ++other) {
        if (other != fiber && can_run(other)) able[count++] = other;
    }
    return count ? able[rng_() % uint64_t(count)] : -1;
}

void Scheduler::line(const Place& place, const char* why, int to) {
    if (!told_) return;
    const char* file = std::strstr(place.file, "csrc/");
    char text[400], who[32] = "";
    if (to >= 0 && to != running_) {
        std::snprintf(who, sizeof who, " -> rank %d%s", to % kProcesses, to < kProcesses ? "" : " (abort)");
    }
    std::snprintf(text, sizeof text, "%10.3f ms  rank %d%s  %-18s %6lu points  %s at %s, %s:%d%s%s",
                  double(clock_) / 1e6 - 1000, running_ % kProcesses, running_ < kProcesses ? "" : " (abort)",
                  doing_(running_).c_str(), static_cast<unsigned long>(fibers_[running_].points), place.what,
                  place.function, file ? file + 5 : place.file, place.line, *why ? "  " : "", why);
    told_(std::string(text) + who);
}

void Scheduler::start() {
    Scheduler& me = *current_;
    me.fibers_[me.running_].body();
    me.settle();
    me.fibers_[me.running_].state = State::kReturned;
    me.leave(-1, {"end", "", "end", 0}, "returns");
    std::abort();
}

// Runs on the stack of the fiber that is left, or of the caller of `run`.
void Scheduler::resume(int fiber) {
    running_ = fiber;
    Fiber& f = fibers_[fiber];
    f.state = State::kReady;
    f.word = nullptr;
    stretch_ = 0;
    arm();
    if (f.begun) _longjmp(f.at, 1);
    f.begun = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stack_of(fiber);
    context.uc_stack.ss_size = kStack;
    context.uc_link = nullptr;
    makecontext(&context, &Scheduler::start, 0);
    setcontext(&context);
    std::abort();
}

void Scheduler::leave(int to, const Place& place, const char* why) {
    int from = running_;
    if (clock_ - 1000 * kMs > settings_.most_ns) stopped_ = "virtual time is used up";
    if (total_ > settings_.most_points) stopped_ = "steps are used up";
    if (to < 0 && stopped_.empty()) {
        to = next_after(from);
        while (to < 0) {  // all wait: time passes until one of them need not
            uint64_t next = kNever;
            for (int i = 0; i < kFibers; ++i) {
                const Fiber& f = fibers_[i];
                const Process& p = processes_[i % kProcesses];
                if (p.ended || (f.state != State::kReady && f.state != State::kSleeps)) continue;
                uint64_t can = f.state == State::kSleeps ? f.until : 0;
                next = std::min(next, std::max(can, p.stopped_until));
            }
            if (next == kNever) break;
            clock_ = std::max(clock_, next);
            to = next_after(from);
        }
    }
    if (from >= 0) line(place, why, to);
    if (!stopped_.empty() || to < 0) _longjmp(main_, 1);
    if (to == from && from >= 0) {
        fibers_[from].state = State::kReady;
        fibers_[from].word = nullptr;
        return arm();
    }
    ++fibers_[to].switches;
    hand_over(from, to);
}

void Scheduler::hand_over(int from, int to) {
    if (from < 0 || !_setjmp(fibers_[from].at)) resume(to);
}

std::string Scheduler::run() {
    if (!_setjmp(main_)) leave(-1, {}, "");
    running_ = -1;
    points_left = armed_ = kNever;
    return stopped_;
}

void Scheduler::give_up(const std::string& why) {
    settle();
    stopped_ = why;
    leave(-1, {"check", "", "check", 0}, "gives up");
    std::abort();
}

void Scheduler::pause(uint64_t ns) {
    settle();
    ++fibers_[running_].points;
    fibers_[running_].state = State::kSleeps;
    fibers_[running_].until = clock_ + ns;
    leave(-1, {"pause", "", "program", 0}, "pauses");
}

// Returns whether the fiber must be left.
bool Scheduler::act(size_t event) {
    const Event& e = settings_.events[event];
    Process& p = processes_[e.process];
    happened_[event] = true;
    if (e.kind == Event::kStart) {
        Fiber& second = fibers_[e.process + kProcesses];
        if (second.state == State::kWaitsForStart) second.state = State::kReady;
        return false;
    }
    if (e.kind == Event::kEnd) {
        p.ended = true;
        p.ended_at = clock_;
    } else {
        p.stopped_until = clock_ + e.ns;
        p.stops.push_back({clock_, p.stopped_until});
    }
    return true;
}

void Scheduler::point(const Place& place) {
    settle();
    Fiber& f = fibers_[running_];
    if (clock_ - 1000 * kMs > settings_.most_ns || total_ > settings_.most_points) {
        return leave(-1, place, "");
    }
    if (auto due = f.events_at.find(f.points); due != f.events_at.end()) {
        const char* why = nullptr;
        for (size_t event : due->second) {
            if (!act(event)) continue;
            why = settings_.events[event].kind == Event::kEnd ? "is killed" : "is stopped";
        }
        if (why) return leave(-1, place, why);
    }
    int to = -1;
    if (auto wanted = f.switch_at.find(f.points); wanted != f.switch_at.end()) {
        if (can_run(wanted->second)) to = wanted->second;
    } else if (settings_.gap > 0 && f.points == f.next_random) {
        to = random_other(running_);
    }
    if (to >= 0 && to != running_) {
        taken_.push_back({running_, f.points, to});
        return leave(to, place, "is preempted");
    }
    if (each_point_) line(place, "", -1);
    arm();
}

// A fiber that yields (ns > 0 if that takes time) or sleeps, which its state says.
void Scheduler::yielded(const Place& place, uint64_t ns) {
    settle();
    Fiber& f = fibers_[running_];
    ++f.points;
    ++total_;
    clock_ += ns;
    if (auto due = f.events_at.find(f.points); due != f.events_at.end()) {
        for (size_t event : due->second) act(event);
    }
    int to = -1;
    if (auto wanted = f.switch_at.find(f.points); wanted != f.switch_at.end()) {
        if (can_run(wanted->second)) to = wanted->second;
    } else if (settings_.turns) {
        to = random_other(running_);
    }
    if (to >= 0) taken_.push_back({running_, f.points, to});
    leave(to, place, f.state == State::kSleeps ? "sleeps" : "yields");
}

void reach(const Place& place) {
    if (Scheduler::current_ && Scheduler::current_->running_ >= 0) return Scheduler::current_->point(place);
    points_left = kNever;
}

uint64_t now_ns() {
    simulation::point("clock");
    const Scheduler& s = *Scheduler::current_;
    return s.settings_.frozen ? 1000 * kMs : s.now();
}

void yield(const Place& place) {
    Scheduler::current_->yielded(place, Scheduler::current_->settings_.yield_ns);
}

void sleep(const void* word, uint32_t value, uint64_t ns, const Place& place) {
    Scheduler& s = *Scheduler::current_;
    simulation::point("futex");
    uint32_t is;
    std::memcpy(&is, word, sizeof is);
    if (is != value) return;
    Scheduler::Fiber& f = s.fibers_[s.running_];
    f.word = word;
    f.until = s.now() + ns;
    f.state = Scheduler::State::kSleeps;
    s.yielded(place, 0);
}

void wake(const void* word) {
    simulation::point("wake");
    for (Scheduler::Fiber& f : Scheduler::current_->fibers_) {
        if (f.state == Scheduler::State::kSleeps && f.word == word) f.state = Scheduler::State::kReady;
    }
}

long switches() { return Scheduler::current_->fibers_[Scheduler::current_->running_].switches; }

int cores() { return Scheduler::current_ ? Scheduler::current_->settings_.cores : 1; }

int current_process() {
    const Scheduler* s = Scheduler::current_;
    if (!s) return 0;
    return s->running_ >= 0 ? s->running_ % kProcesses : s->chosen_;
}

bool process_ended(int process) {
    return Scheduler::current_ && Scheduler::current_->processes_[process].ended;
}

uint64_t random_id() {
    uint64_t id = Scheduler::current_->rng_();
    return id ? id : 1;
}

}  // namespace unicomm::simulation
