# Starts one of rdma-vm's machines. Sourced by rdma-vm.
# shellcheck shell=bash

# Panics end QEMU (-no-reboot); an oops is one, because after it nothing that is measured counts.
# The tests that the kernel makes of its ciphers at every boot take a second of emulation.
readonly kernel_arguments='console=ttyS0 quiet panic=-1 oops=panic mitigations=off tsc=reliable
  random.trust_cpu=on cryptomgr.notests audit=0 apparmor=0 nowatchdog
  rcupdate.rcu_cpu_stall_suppress=1'

# NIC i of a machine ends in this hardware address, which guest reads i from.
nic_device() {
  printf 'virtio-net-pci,netdev=n%d,mac=52:54:00:77:%02x:%02x,host_mtu=4200,romfile=' \
    "$2" "$1" "$2"
}

# wire MACHINE NIC: what the NIC is connected with.
wire() {
  if [[ $mode != pair ]]; then
    printf 'hubport,id=n%d,hubid=%d' "$2" "$2"  # a hub with nothing else on it: link, no peer
  elif [[ $1 == box ]]; then
    printf 'stream,id=n%d,server=on,addr.type=unix,addr.path=wire%d' "$2" "$2"
  else
    printf 'stream,id=n%d,server=off,addr.type=unix,addr.path=wire%d' "$2" "$2"
  fi
}

# machine_arguments MACHINE: sets `arguments` to those that differ between the machines. The box has
# two NUMA nodes, and on each a PCIe host bridge with two NICs.
machine_arguments() {
  local node nic
  arguments=()
  case $1 in
    rdma) arguments+=(-smp 2 -m "$memory_mib") ;;
    worker)
      arguments+=(-smp 2 -m "$memory_mib")
      for nic in 0 1 2 3; do
        arguments+=(-netdev "$(wire worker "$nic")" -device "$(nic_device 2 "$nic")")
      done
      ;;
    box)
      arguments+=(-smp 4,sockets=2,cores=2,threads=1 -m "$memory_mib")
      # The bridge that is described last is looked at first: so eth0 and eth1 are those of node 0.
      for node in 1 0; do
        arguments+=(
          -object "memory-backend-ram,id=memory$node,size=$((memory_mib / 2))M"
          -numa "node,nodeid=$node,cpus=$((2 * node))-$((2 * node + 1)),memdev=memory$node"
          -device "pxb-pcie,id=bridge$node,bus=pcie.0,bus_nr=$((32 * (node + 1))),numa_node=$node"
        )
        for nic in $((2 * node)) $((2 * node + 1)); do
          arguments+=(
            -device "pcie-root-port,id=port$nic,bus=bridge$node,chassis=$((nic + 1))"
            -netdev "$(wire box "$nic")" -device "$(nic_device 1 "$nic"),bus=port$nic"
          )
        done
      done
      ;;
  esac
}

# start_machine MACHINE COMMAND…: the machine takes its parts from and leaves its traces in
# $run/MACHINE. All machines write to the one pipe $run/events.
start_machine() {
  local name=$1 folder=$run/$1 arguments
  shift
  mkdir -p "$folder/rdma-vm"
  cp "$rdma_vm_parts/guest" "$folder/rdma-vm/"
  case $name in
    rdma) printf "name=rdma address=1 peer='' nics=0\n" ;;
    box) printf "name=box address=1 peer='' nics=4\n" ;;
    worker) printf "name=worker address=2 peer=1 nics=4\n" ;;
  esac >"$folder/rdma-vm/machine"
  printf 'project=%q\n' "$rdma_vm_root" >>"$folder/rdma-vm/machine"
  write_job "$@" >"$folder/rdma-vm/job"
  # The kernel unpacks one archive after the other.
  {
    cat "$image_initramfs"
    (cd "$folder" && find rdma-vm | cpio --quiet -o -H newc -R 0:0)
  } >"$folder/initramfs"

  mkfifo "$folder/stdout" "$folder/stderr" "$folder/control.in"
  ln -s ../events "$folder/control.out"
  local prefix=(cat)
  if [[ $mode == pair ]]; then prefix=(sed -u "s/^/$name| /"); fi
  "${prefix[@]}" <"$folder/stdout" &
  readers+=($!)
  "${prefix[@]}" <"$folder/stderr" >&2 &
  readers+=($!)

  machine_arguments "$name"
  # With this process gone, even by SIGKILL, QEMU goes. It runs in $run, where the wires are.
  (
    cd "$run"
    exec setpriv --pdeathsig KILL qemu-system-x86_64 -name "$name" -nodefaults -no-user-config \
      -display none -no-reboot -machine q35,smbus=off,sata=off,usb=off,smm=off,vmport=off,hpet=off \
      -accel tcg,thread=multi -cpu max \
      -kernel "$image_kernel" -initrd "$name/initramfs" -append "${kernel_arguments//$'\n'/ }" \
      -fsdev local,id=host,path=/,security_model=none,readonly=on,multidevs=remap \
      -device virtio-9p-pci,fsdev=host,mount_tag=host \
      -serial "file:$name/console" -device virtio-serial-pci \
      -chardev "pipe,id=control,path=$name/control" -chardev "file,id=stdout,path=$name/stdout" \
      -chardev "file,id=stderr,path=$name/stderr" \
      -device virtserialport,chardev=control,name=control \
      -device virtserialport,chardev=stdout,name=stdout \
      -device virtserialport,chardev=stderr,name=stderr \
      "${arguments[@]}"
  ) </dev/null >"$folder/qemu" 2>&1 &
  pid[$name]=$!
  exec {control}<>"$folder/control.in"
  controls[$name]=$control
}

# The command with the caller's folder and variables, as bash reads it in the machine.
write_job() {
  local variable
  for variable in PATH HOME $(compgen -e -X '!PHUB_*') $(compgen -e -X '!GTEST_*'); do
    if [[ -v $variable ]]; then printf 'export %s=%q\n' "$variable" "${!variable}"; fi
  done
  # The part before the command is run with bash's own names out of the way of the command's.
  printf 'if ! cd -- %q 2>/dev/null; then\n' "$PWD"
  printf '  echo %q >&2\n  exit 125\nfi\n' \
    "rdma-vm: the folder $PWD does not exist in the machine, which has its own /tmp"
  printf 'exec --'
  printf ' %q' "$@"
  printf '\n'
}
