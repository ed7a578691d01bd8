// What the programs that run kernels without ONNX Runtime or Python have in common.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "attention.h"

// So many values of the input. Ends the program where there are fewer.
template <class T>
std::vector<T> read_array(int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  const size_t got = std::fread(values.data(), sizeof(T), values.size(), stdin);
  if (got != values.size()) std::exit(3);
  return values;
}

// Three threads that take the tasks from the last to the first.
inline int run_on_threads(void*, size_t count, onnxport::Task task, void* argument) {
  std::atomic<size_t> left{count};
  const auto work = [&] {
    for (size_t i = left.load(); i > 0;)
      if (left.compare_exchange_weak(i, i - 1)) {
        task(argument, i - 1);
        i = left.load();
      }
  };
  std::thread second(work), third(work);
  work();
  second.join();
  third.join();
  return 0;
}
