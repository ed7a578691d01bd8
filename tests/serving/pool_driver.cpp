// Exercises the sampler's threads by themselves; ends with 0 if all is as promised.
//
//   pool_driver meet    every helper that was asked for comes, also in a forked child
//   pool_driver many    calls from several threads at once: each item is done once, and is seen
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "pool.h"

namespace {

struct Meeting {
  std::atomic<int64_t> entered{0};
  int64_t wanted;
};

// Goes on once everyone has come; if one never does, the test's time is up.
void meet(void* argument) {
  Meeting& meeting = *static_cast<Meeting*>(argument);
  meeting.entered++;
  while (meeting.entered < meeting.wanted) std::this_thread::yield();
}

bool all_come(int64_t helpers) {
  Meeting meeting;
  meeting.wanted = helpers + 1;
  onnxport::run_together(meet, &meeting, helpers);
  return meeting.entered == helpers + 1;
}

bool meetings() {
  for (const int64_t helpers : {0, 1, 3, 2, 5}) {
    if (!all_come(helpers)) return false;
  }
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // ends a child that hangs
    _exit(all_come(4) ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0 && all_come(3);
}

struct Items {
  std::atomic<size_t> next{0};
  std::vector<int> done;
};

void do_items(void* argument) {
  Items& items = *static_cast<Items*>(argument);
  for (size_t i; (i = items.next++) < items.done.size();) items.done[i]++;
}

bool many_calls(unsigned seed) {
  for (unsigned call = 0; call < 2000; call++) {
    Items items;
    items.done.resize((seed + call * 7) % 50);
    onnxport::run_together(do_items, &items, (seed + call) % 5);
    for (const int times : items.done) {
      if (times != 1) return false;
    }
  }
  return true;
}

bool crowd() {
  std::atomic<bool> good{true};
  std::vector<std::thread> callers;
  for (unsigned seed = 0; seed < 4; seed++) {
    callers.emplace_back([&good, seed] {
      if (!many_calls(seed)) good = false;
    });
  }
  for (std::thread& caller : callers) caller.join();
  return good;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) return 2;
  const bool good = std::strcmp(arguments[1], "meet") == 0 ? meetings() : crowd();
  std::puts(good ? "good" : "bad");
  return good ? 0 : 1;
}
