# The kernel and the initramfs of rdma-vm's machines: made once from Debian's kernel package, kept
# under build/rdma-vm. Sourced by rdma-vm.
# shellcheck shell=bash

readonly image_cache=$rdma_vm_root/build/rdma-vm

# What the machines load, each with what modprobe says that it needs. rdma_rxe computes its ICRC with
# crc32_generic, and asks for it by a name that modprobe does not follow.
readonly image_modules=(
  virtio_pci 9pnet_virtio 9p overlay virtio_console
  virtio_net dummy veth sch_netem crc32_generic rdma_rxe ib_uverbs rdma_ucm loop ext4
)

# lacking WHAT: ends the run with status 77 ("not available"), which test runners show as skipped.
lacking() {
  printf 'rdma-vm: %s; scripts/setup --test installs what is missing\n' "$*" >&2
  exit 77
}

# Sets image_kernel and image_initramfs, and makes both where they are not there yet.
prepare_image() {
  command -v qemu-system-x86_64 >/dev/null || lacking 'there is no qemu-system-x86_64'
  local key
  key=$(cat "$rdma_vm_parts/image.sh" "$rdma_vm_parts/init" | sha256sum)
  local image=$image_cache/image-${key:0:12}
  image_kernel=$image/vmlinux
  image_initramfs=$image/initramfs
  [[ -f $image/complete ]] && return

  local tool
  for tool in busybox cpio depmod modprobe xz dpkg-deb flock; do
    command -v "$tool" >/dev/null || PATH=$PATH:/usr/sbin:/sbin command -v "$tool" >/dev/null ||
      lacking "there is no $tool to make the machine's image with"
  done
  mkdir -p "$image_cache"
  (
    flock 9
    [[ -f $image/complete ]] || make_image "$image"
  ) 9>"$image_cache/lock" || exit
}

# The package is kept, so that a change of the initramfs needs no network.
fetch_kernel_package() {
  compgen -G "$image_cache/linux-image-*.deb" >/dev/null && return
  command -v apt-get >/dev/null || lacking "there is no apt-get to fetch Debian's kernel with"
  local as_root=() folder=$image_cache/download
  if ((EUID != 0)); then as_root=(sudo -n); fi
  rm -rf "$folder"
  mkdir -p "$folder"
  # Stale package lists name a kernel that is gone from the archive: refresh them once, try again.
  download_kernel_package "$folder" ||
    { "${as_root[@]}" apt-get update && download_kernel_package "$folder"; } >/dev/null 2>&1 ||
    lacking "apt-get could not download Debian's kernel (package linux-image-amd64)"
  mv "$folder"/linux-image-*.deb "$image_cache/"
  rm -r "$folder"
}

download_kernel_package() {
  local package
  package=$(apt-cache depends linux-image-amd64 2>/dev/null |
    awk '$1 == "Depends:" && $2 ~ /^linux-image-[0-9]/ { print $2; exit }')
  [[ $package ]] && (cd "$1" && apt-get download "$package") >/dev/null 2>&1
}

make_image() {
  local image=$1 work=$image_cache/work
  fetch_kernel_package
  rm -rf "$work" "$image_cache"/image-*
  mkdir -p "$work/initramfs/"{bin,dev,proc,sys,modules} "$image"
  local packages=("$image_cache"/linux-image-*.deb)
  dpkg-deb -x "${packages[-1]}" "$work/kernel"
  local kernels=("$work"/kernel/boot/vmlinuz-*)
  local release=${kernels[0]##*/vmlinuz-}
  unpack_kernel "${kernels[0]}" >"$image/vmlinux"
  copy_modules "$work/kernel" "$release" "$work/initramfs"
  cp -L "$(command -v busybox)" "$work/initramfs/bin/busybox"
  if ldd "$work/initramfs/bin/busybox" >/dev/null 2>&1; then
    lacking 'busybox is not linked statically (package busybox-static)'
  fi
  cp "$rdma_vm_parts/init" "$work/initramfs/init"
  chmod 755 "$work/initramfs/init"
  (cd "$work/initramfs" && find . | cpio --quiet -o -H newc -R 0:0) >"$image/initramfs"
  rm -rf "$work"
  touch "$image/complete"
}

# The ELF kernel inside a bzImage: QEMU starts it directly, which saves the two seconds that the
# emulated machine would take to unpack it. The fields are those of Documentation/x86/boot.rst.
unpack_kernel() {
  local setup_sectors offset length
  setup_sectors=$(od -An -tu1 -j $((0x1f1)) -N1 "$1")
  offset=$(od -An -tu4 -j $((0x248)) -N4 "$1")
  length=$(od -An -tu4 -j $((0x24c)) -N4 "$1")
  # The last four bytes of the payload are its unpacked size, no part of the xz stream.
  tail -c +$(((setup_sectors + 1) * 512 + offset + 1)) "$1" | head -c $((length - 4)) | xz -dc
}

# copy_modules KERNEL RELEASE INITRAMFS: the modules, and `order`, a line for each as it is loaded.
copy_modules() {
  local PATH=$PATH:/usr/sbin:/sbin module path
  depmod -b "$1" "$2"
  for module in "${image_modules[@]}"; do
    modprobe -d "$1" -S "$2" --show-depends "$module"
  done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' |
    while read -r path; do
      cp "$path" "$3/modules/"
      printf '%s\n' "${path##*/}"
    done >"$3/modules/order"
  # Without this it makes a device of its own.
  sed -i 's/^dummy.ko$/& numdummies=0/' "$3/modules/order"
}
