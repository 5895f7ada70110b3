// The switch that adds, for XDP: on every port to which a worker is connected. It needs no address:
// workers send to the box, and a part that is not the last of its turn ends here. What is not for
// it, and what it refuses, passes to the bridge. It knows parts by their length and their magic
// number, whatever the UDP port of the box is.
// In this order: helpers need the types of bpf.h.
// clang-format off
#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
// clang-format on
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>

#include "transport/switch/shared.h"
#include "transport/switch/slot.h"

struct LockedSlot {
  struct bpf_spin_lock lock;
  struct SwitchSlot slot;
};

struct {
  __uint(type, BPF_MAP_TYPE_ARRAY);
  __uint(max_entries, 2);  // the loader sets it
  __type(key, __u32);
  __type(value, struct LockedSlot);
} slots SEC(".maps");

struct {
  __uint(type, BPF_MAP_TYPE_ARRAY);
  __uint(max_entries, kSwitchWorkers);
  __type(key, __u32);
  __type(value, __u32);
} ports SEC(".maps");

struct {
  __uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
  __uint(max_entries, kSwitchCounters);
  __type(key, __u32);
  __type(value, __u64);
} counters SEC(".maps");

struct Frame {
  struct ethhdr ethernet;
  struct iphdr ip;
  struct udphdr udp;
  struct SwitchPacket packet;
} __attribute__((packed));

static __always_inline void count(__u32 what) {
  __u64* const counter = bpf_map_lookup_elem(&counters, &what);
  if (counter) ++*counter;
}

SEC("xdp")
int phub_switch(struct xdp_md* context) {
  char* const data = (char*)(long)context->data;
  struct Frame* const frame = (struct Frame*)data;
  struct SwitchHeader* const header = (struct SwitchHeader*)(data + kSwitchFrameHeader);
  int32_t* const codes = (int32_t*)(header + 1);
  if ((char*)(frame + 1) > (char*)(long)context->data_end) return XDP_PASS;
  if (frame->ethernet.h_proto != bpf_htons(ETH_P_IP) || frame->ip.ihl != 5 ||
      frame->ip.protocol != IPPROTO_UDP || (frame->ip.frag_off & bpf_htons(0x3FFF)) != 0 ||
      frame->udp.len != bpf_htons(sizeof(struct udphdr) + sizeof(struct SwitchPacket)) ||
      header->magic != kSwitchMagic || header->kind != kSwitchPart) {
    return XDP_PASS;
  }
  __u32 worker = header->worker;
  const __u32* const port = bpf_map_lookup_elem(&ports, &worker);
  if (!port || *port != context->ingress_ifindex) {
    count(kSwitchForged);
    return XDP_DROP;
  }
  const __u32 place = switch_place(header->slot, header->turn);
  struct LockedSlot* const locked = bpf_map_lookup_elem(&slots, &place);
  if (!locked) {
    count(kSwitchRefused);
    return XDP_PASS;
  }
  bpf_spin_lock(&locked->lock);
  const enum SwitchVerdict verdict = switch_take(&locked->slot, header, codes);
  bpf_spin_unlock(&locked->lock);
  count(verdict);
  if (verdict == kSwitchAdded || verdict == kSwitchLate) return XDP_DROP;
  if (verdict != kSwitchRefused) frame->udp.check = 0;  // none, as IPv4 allows
  return XDP_PASS;
}
