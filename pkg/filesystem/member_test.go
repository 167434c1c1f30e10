package filesystem

import (
	"os"
	"strings"
	"testing"
)

// What somebody may put to use is told from what is only there.
func TestMembership(t *testing.T) {
	h := newHost(t)
	const bytes = 16 * mib
	at := func(offset int64, text string) func(string) {
		return func(path string) {
			f, err := os.OpenFile(path, os.O_WRONLY, 0)
			must0(t, err)
			_, err = f.WriteAt([]byte(text), offset)
			must0(t, err)
			must0(t, f.Close())
		}
	}
	ext4 := func(path string) { must0(t, h.Format(t.Context(), attach(t, path), "ext4", nil)) }
	last := int64(bytes-16*512) &^ 4095 // where a RAID 1.0 has its superblock
	for name, c := range map[string]struct {
		make []func(path string)
		want string // "": it is a part of nothing
	}{
		"blank":                           {nil, ""},
		"data":                            {[]func(string){at(0, "somebody's")}, ""},
		"LUKS":                            {[]func(string){at(0, "LUKS\xba\xbe")}, ""},
		"ext4":                            {[]func(string){ext4}, ""},
		"LVM":                             {[]func(string){at(512, "LABELONE")}, "LVM2 physical volume at byte 512"},
		"RAID":                            {[]func(string){at(4096, mdMagic)}, "MD RAID 1.2"},
		"RAID at its end":                 {[]func(string){at(last, mdMagic)}, "MD RAID 1.0"},
		"a partition table":               {[]func(string){at(512, gptMagic)}, "GPT partition table"},
		"an old partition table":          {[]func(string){at(446+4, "\x83"), at(446+12, "\x01"), at(510, bootMagic)}, "MBR partition table"},
		"Intel RAID":                      {[]func(string){at(bytes-1024, intelMagic)}, "Intel RAID metadata"},
		"DDF RAID":                        {[]func(string){at(bytes-512, "\xde\x11\xde\x11")}, "DDF RAID header"},
		"DRBD":                            {[]func(string){at(bytes-4096+60, "\x83\x74\x02\x6b")}, "DRBD metadata"},
		"a partition table, once an ISO":  {[]func(string){at(446+4, "\x83"), at(446+12, "\x01"), at(510, bootMagic), at(32<<10+1, "CD001")}, "MBR partition table"},
		"a FAT with partitions for show":  {[]func(string){at(54, "FAT16   "), at(446+4, "\x83"), at(446+12, "\x01"), at(510, bootMagic)}, ""},
		"Ceph":                            {[]func(string){at(0, "bluestore block device")}, "Ceph BlueStore"},
		"what an ext4 has where RAID has": {[]func(string){ext4, at(last, mdMagic)}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			path := newImage(t, bytes)
			for _, change := range c.make {
				change(path)
			}
			f, err := os.Open(path)
			must0(t, err)
			defer f.Close()
			if got, err := Membership(f, bytes); err != nil || !strings.Contains(got, c.want) || (got == "") != (c.want == "") {
				t.Errorf("it is a part of %q (%v), want %q", got, err, c.want)
			}
		})
	}
	f, err := os.Open(newImage(t, 4096)) // smaller than what is looked at
	must0(t, err)
	defer f.Close()
	if got, err := Membership(f, 4096); got != "" || err != nil {
		t.Errorf("a small device is a part of %q (%v)", got, err)
	}
}
