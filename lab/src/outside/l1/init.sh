#!/bin/busybox sh
# SPDX-License-Identifier: GPL-2.0-only
# L1's first process: from the initrd to the read-only image with a tmpfs above. Each failure ends in a kernel panic,
# which the lab outside reports with the console.
set -e
/bin/busybox mkdir -p /proc /sys /dev /image /rw /new
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
modules=/layer/usr/lib/modules/$(uname -r)
while read -r module; do
	insmod "$modules/$module"
done <"$modules/load-order"
# The device of a name from the kernel's command line (machine/mod.rs): a path, or the place of a disk of whose names the
# order is chance.
device() {
	case $1 in
	scsi:*) echo /dev/$(ls "/sys/bus/scsi/devices/${1#scsi:}/block") ;;
	*) echo "$1" ;;
	esac
}
# Waits until the device of a name is there, and calls it $2.
link() {
	looks=0
	until [ -b "$(device "$1" 2>/dev/null)" ]; do
		looks=$((looks + 1))
		[ $looks -lt 500 ]
		sleep 0.01
	done
	ln -s "$(device "$1")" "$2"
}
link "$lab_root" /dev/lab-root
link "$lab_out" /dev/lab-out
[ -z "$lab_guest_image" ] || link "$lab_guest_image" /dev/lab-guest-image
mount -t erofs -o ro /dev/lab-root /image
mount -t tmpfs -o mode=0755,size=75% tmpfs /rw
mkdir /rw/upper /rw/work
mount -t overlay -o lowerdir=/layer:/image,upperdir=/rw/upper,workdir=/rw/work overlay /new
for mount in proc sys dev; do
	mount --move "/$mount" "/new/$mount"
done
# As switch_root does, without removing the initrd's files: /layer, the part that differs from run to run, is a layer of
# the new root, which saves copying it.
cd /new
mount --move . /
exec chroot . /cohort/stage2
