// Package filesystem handles the contents of devices: it probes, proves blank,
// formats, checks and grows; and it knows the mount options of each kind of file
// system. It mounts nothing, and knows nothing of volumes and intents.
//
// Read first: host.go (the interface kind) and ext4.go (one kind). Then probe.go,
// guard.go (the proof), stamp.go (the trial), format.go, grow.go, check.go, and mount.go with kernellog.go.
//
// # What Probe answers
//
// Probe reads superblocks itself and judges in this order:
//
//  1. a superblock that is valid (magic, checksum and consistency), of a file
//     system that fits on the device, with no sign of another owner of the
//     device: a file system;
//  2. a valid superblock together with such a sign, two valid superblocks, a
//     file system that is larger than its device, a superblock with the right
//     magic that is otherwise broken, any other signature: something else;
//  3. no signature: the device is proved blank, or it is something else.
//
// A sign of another owner is any signature of signatures.go at the head of the device
// (a LUKS header, an LVM physical volume, swap, another file system, a
// partition table with entries), as far as no file of the file system lies there,
// and the metadata of RAID at the end of the device, behind the file
// system. A file system beneath another owner is stale: mounting it would
// replay its journal over somebody's data. A signature inside the span of the
// file system, past its own head, is a user's file and does not count, nor does
// the backup of a partition table, which nobody reads without the primary.
//
// A btrfs that needs, or serves, other devices is something else, too, and so is an
// ext4 with its journal on another device: a volume is one device.
//
// What cannot be read is something else, too: never blank, never mounted. It may be read
// again later, so nobody is advised to destroy it.
//
// # The proof of blankness
//
// Only zeros are blank. The device is opened, has the size it should have, and
// every byte of it is read and is zero, except what is known to be zero without
// reading: holes and unwritten extents of the file behind a loop device, and a
// device that nobody has used, according to the backend's metadata. A device is
// refused, not sampled, when there is more to read than ProveLimit. The search for
// known signatures only gives the finding a name.
//
// A look (Probe) reads no more than 64 MiB and then says that the rest was not
// proven; Prove reads, once, before a format is begun, and Format what may be
// data when it begins.
//
// # The trial
//
// A disk behind a fault reads as zeros for a while, and has its data again. So one that others
// made is tried before it is formatted (Try): it must keep a stamp. What a format leaves has
// the UUID of the stamp, so that it is told from data which turns up later
// (state.Contents.Origin).
//
// # Kinds
//
// A kind of file system is a file of its own (ext4.go, xfs.go, btrfs.go) behind the small
// interface kind: its programs, its sizes, its mount options and what it writes to the
// kernel's log, with the parser of its superblock and the arithmetic of its growth
// beside it.
package filesystem
