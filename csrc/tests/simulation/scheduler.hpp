// A cooperative scheduler with virtual time. Each simulated process has fibers; one fiber runs at a time, and
// at each point (base/simulation.hpp) another one may go on. Processes end and stop at points.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/simulation.hpp"

namespace unicomm::simulation {

constexpr int kFibers = 2 * kProcesses;  // process p has the fibers p (its rank) and p + kProcesses
constexpr uint64_t kMs = 1000000;

// At its n-th point, `fiber` hands over to `to`, if that one can run.
struct Switch {
    int fiber;
    uint64_t point;
    int to;
};

// What happens to a process when its rank reaches its n-th point.
struct Event {
    enum Kind { kEnd, kStop, kStart } kind;  // kStart: its second fiber starts
    int process;
    uint64_t point;
    uint64_t ns = 0;  // for kStop: how long
};

struct Settings {
    uint64_t seed = 0;      // of random switches and random ids
    double gap = 0;         // mean number of points between two random switches; 0: only `switches`
    bool turns = false;     // whether the fiber that follows one that yields is random
    uint64_t yield_ns = 0;  // how long a yield lasts
    int cores = 1;
    bool frozen = false;  // a planted defect: the clock of the core stands still
    std::vector<Switch> switches;
    std::vector<Event> events;
    uint64_t most_ns = 0, most_points = 0;  // a run that needs more hangs
};

class Scheduler {
  public:
    // `told` gets a line for each stretch that a fiber runs, or for each point; `doing` says what a fiber
    // does.
    using Told = std::function<void(const std::string&)>;
    explicit Scheduler(Settings settings);
    ~Scheduler();

    void tell(Told told, bool each_point, std::function<std::string(int fiber)> doing);
    // Sets the process for which the caller, who is no fiber, creates things.
    void create_for(int process) { chosen_ = process; }
    // Adds a fiber. That of process p + kProcesses starts at the event kStart of p.
    void add(int fiber, std::function<void()> body);
    // Runs all fibers until they have returned or their processes have ended. Returns why it stopped before,
    // or an empty text.
    std::string run();

    // --- for the body of a fiber ---
    [[noreturn]] void give_up(const std::string& why);  // ends the run
    void pause(uint64_t ns);                            // virtual time
    static Scheduler* current() { return current_; }

    // --- what happened ---
    uint64_t now() const;
    uint64_t points() const { return total_; }
    bool ended(int process) const { return processes_[process].ended; }
    uint64_t ended_at(int process) const { return processes_[process].ended_at; }
    const std::vector<std::pair<uint64_t, uint64_t>>& stops(int process) const {
        return processes_[process].stops;
    }
    const std::vector<Switch>& taken() const { return taken_; }  // switches that `switches` would repeat
    bool happened(size_t event) const { return happened_[event]; }

  private:
    friend void simulation::reach(const Place&);
    friend void simulation::yield(const Place&);
    friend void simulation::sleep(const void*, uint32_t, uint64_t, const Place&);
    friend void simulation::wake(const void*);
    friend uint64_t simulation::now_ns();
    friend long simulation::switches();
    friend int simulation::cores();
    friend int simulation::current_process();
    friend bool simulation::process_ended(int);
    friend uint64_t simulation::random_id();

    enum class State { kAbsent, kWaitsForStart, kReady, kSleeps, kReturned };
    struct Fiber {
        State state = State::kAbsent;
        std::function<void()> body;
        bool begun = false;
        jmp_buf at{};
        uint64_t points = 0, next_random = 0;
        long switches = 0;
        const void* word = nullptr;  // it sleeps for this word ...
        uint64_t until = 0;          // ... until then
        std::map<uint64_t, int> switch_at;
        std::map<uint64_t, std::vector<size_t>> events_at;
    };
    struct Process {
        bool ended = false;
        uint64_t ended_at = 0, stopped_until = 0;
        std::vector<std::pair<uint64_t, uint64_t>> stops;
    };

    void point(const Place& place);
    void yielded(const Place& place, uint64_t ns);
    bool act(size_t event);
    bool can_run(int fiber) const;
    int next_after(int fiber);
    int random_other(int fiber);
    // Leaves the running fiber for `to` (-1: whichever can run).
    void leave(int to, const Place& place, const char* why);
    void hand_over(int from, int to);
    void resume(int fiber);
    void settle();  // counts the points of the running fiber
    void arm();     // sets when the running fiber must look again
    static void start();
    void line(const Place& place, const char* why, int to);

    Settings settings_;
    std::mt19937_64 rng_;
    Fiber fibers_[kFibers];
    Process processes_[kProcesses];
    std::vector<bool> happened_;
    std::vector<Switch> taken_;
    int running_ = -1, chosen_ = 0;
    uint64_t armed_ = 0;  // points_left when the running fiber was armed
    uint64_t clock_ = 0, total_ = 0, stretch_ = 0;
    std::string stopped_;
    jmp_buf main_;
    Told told_;
    bool each_point_ = false;
    std::function<std::string(int)> doing_;
    static Scheduler* current_;
};

}  // namespace unicomm::simulation
