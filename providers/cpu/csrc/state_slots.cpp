#include "state_slots.h"

#include <vector>

#include "tensor.h"

namespace onnxport {
namespace {

using Long = long long;

void check_lengths(const StateSlots& s) {
  const int32_t* cumulative = s.cumulative_lengths;
  if (cumulative[0] != 0)
    refuse("cumulative_sequence_length must begin with 0, found %d", cumulative[0]);
  for (int64_t i = 0; i < s.batch; i++)
    if (cumulative[i + 1] < cumulative[i])
      refuse("cumulative_sequence_length must not decrease, found %d after %d at %lld",
             cumulative[i + 1], cumulative[i], Long{i + 1});
  if (cumulative[s.batch] != s.num_tokens)
    refuse("cumulative_sequence_length must end with the number of tokens %lld, found %d",
           Long{s.num_tokens}, cumulative[s.batch]);
}

}  // namespace

void check_slots(const StateSlots& s) {
  check_lengths(s);
  for (int64_t i = 0; i < s.batch; i++) {
    if (s.reads[i] < 0 || s.reads[i] >= s.num_slots)
      refuse("state_reads[%lld] must be in [0, %lld), found %d", Long{i}, Long{s.num_slots},
             s.reads[i]);
    if (s.writes[i] < 1 || s.writes[i] >= s.num_slots)
      refuse("state_writes[%lld] must be in [1, %lld), found %d", Long{i}, Long{s.num_slots},
             s.writes[i]);
  }
  thread_local std::vector<bool> written;
  written.assign(static_cast<size_t>(s.num_slots), false);
  for (int64_t i = 0; i < s.batch; i++) {
    if (written[static_cast<size_t>(s.writes[i])])
      refuse("state_writes[%lld] is %d, which another sequence writes, too", Long{i}, s.writes[i]);
    written[static_cast<size_t>(s.writes[i])] = true;
  }
  for (int64_t i = 0; i < s.batch; i++)
    if (s.reads[i] != s.writes[i] && written[static_cast<size_t>(s.reads[i])])
      refuse("state_reads[%lld] is %d, which another sequence of the step writes", Long{i},
             s.reads[i]);
}

}  // namespace onnxport
