// What was decided for a running job, for the people who look at it: where its chunks lie, and what
// its ranks tell, such as which gradients go as factors. A new text is a line for the server's
// operator, too, of a subject at most one in a minute. They are in no checkpoint. The running job
// owns it. Control thread.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "phub/clock.h"
#include "phub/job/job.h"
#include "phub/notes.h"
#include "transport/control/messages.h"

namespace phub {

class Remarks {
 public:
  // All of these outlive this.
  Remarks(const Job& job, Notes& notes, const Clock& clock);

  // Replaces the text of the subject; "" takes it away. Throws Error(kFull): there are kMostRemarks
  // other subjects.
  void put(const Remark& remark);
  // A rank has joined, and is at this machine, as its JobSpec::rank_hosts says; 0: it does not say.
  // Where chunks lie at the machines of ranks, a remark names the ranks that are at another one
  // than the plan was made for, when they joined last; not those whose machine the plan did not
  // know. A checkpoint that is restored is planned anew.
  void note_machine(uint32_t rank, uint64_t host);
  void add_to(JobStatus& status) const { status.remarks = remarks_; }

 private:
  static constexpr uint64_t kMsPerNote = 60'000;  // of a subject
  void note(const Remark& remark);

  const Job& job_;
  const std::string& name_;
  Notes& notes_;
  const Clock& clock_;
  std::vector<Remark> remarks_;               // in the order in which their subjects came
  std::set<uint32_t> moved_;                  // ranks that are at another machine
  std::map<std::string, uint64_t> noted_ms_;  // by subject: when, if less than kMsPerNote ago
};

}  // namespace phub
