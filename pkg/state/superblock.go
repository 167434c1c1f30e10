package state

import (
	"slices"
	"strconv"
	"strings"
)

// Shown compares the flags with the options that the kernel shows of a superblock of
// that type, separated by commas: those of its mount and, for ext4, those in
// /proc/fs/ext4/<device>/options. It returns the name of an option that differs: it was
// asked for and is not shown, or it changes how data is kept and was not asked for; ""
// if there is none.
func (f Flags) Shown(fsType, options string) string {
	shown := splitOptions(options)
	for i := range shown {
		shown[i] = strings.ReplaceAll(shown[i], `"`, "")
	}
	topics := f.effective()
	var asked []string // in the kernel's words
	for _, option := range f.Super {
		topic, _ := topicOf(option)
		if all := topics[topic]; !slices.Contains(all, option) || slices.Contains(lastWins, topic) && option != all[len(all)-1] {
			continue // a later one overrides it
		}
		word := kernelWord(fsType, option)
		if !holds(fsType, word, shown) {
			return OptionName(option)
		}
		asked = append(asked, word)
	}
	for _, word := range shown {
		if matters(fsType, word) && !slices.Contains(asked, word) {
			return OptionName(word)
		}
	}
	return ""
}

// lastWins are topics of which the last option overrides all others.
var lastWins = []string{"sync", "inodes", "groups", "df", "dioread"}

// holds reports whether a word holds of a superblock: it is shown, or it is the
// default and nothing to the contrary is shown.
func holds(fsType, word string, shown []string) bool {
	if slices.Contains(shown, word) {
		return true
	}
	contrary, isDefault := defaults[fsType][word]
	if !isDefault {
		contrary, isDefault = defaults[""][word]
	}
	return isDefault && !slices.ContainsFunc(shown, func(s string) bool {
		return s == contrary || strings.HasPrefix(s, contrary+"=")
	})
}

// matters reports whether an option changes how data is kept. The kernel shows such an
// option only if somebody asked for it.
func matters(fsType, word string) bool {
	if value, ok := strings.CutPrefix(word, "commit="); ok {
		return !holds(fsType, "commit="+value, nil)
	}
	return slices.Contains([]string{
		"sync", "dirsync", "lazytime", "norecovery", "rescue=nologreplay", "nobarrier", "data=journal", "data=writeback", "nodatacow",
	}, word)
}

// kernelWord returns what the kernel shows of an option.
func kernelWord(fsType, option string) string {
	if word := otherWords[fsType][option]; word != "" {
		return word
	}
	key, value, valued := strings.Cut(option, "=")
	if !valued {
		return option
	}
	value = strings.Trim(value, `"`)
	if n, err := strconv.ParseInt(value, 10, 64); err == nil && fsType == "xfs" && (key == "logbsize" || key == "allocsize") {
		value = strconv.FormatInt(n>>10, 10) + "k"
	}
	return key + "=" + value
}

// defaults holds, by type, the options that are the default, which the kernel does not show.
// Each comes with its contrary: the word, or the name of the option, that is shown instead.
var defaults = map[string]map[string]string{
	"":     {"async": "sync", "nolazytime": "lazytime", "nodiscard": "discard"},
	"ext4": {"commit=5": "commit", "data=ordered": "data", "barrier": "nobarrier", "delalloc": "nodelalloc"},
	"xfs":  {"noikeep": "ikeep", "nolargeio": "largeio", "attr2": "noattr2"},
	"btrfs": {
		"barrier": "nobarrier", "acl": "noacl", "treelog": "notreelog", "datacow": "nodatacow", "datasum": "nodatasum",
		"noautodefrag": "autodefrag", "noflushoncommit": "flushoncommit", "noenospc_debug": "enospc_debug",
		"commit=30": "commit", "max_inline=2048": "max_inline",
		"compress=no": "compress", "compress=none": "compress", "compress-force=no": "compress-force", "compress-force=none": "compress-force",
	},
}

// otherWords holds, by type, the options that the kernel shows by other words
// than they are asked for (ext4_show_options in fs/ext4/super.c,
// xfs_fs_show_options in fs/xfs/xfs_super.c, btrfs_show_options in fs/btrfs/super.c).
var otherWords = map[string]map[string]string{
	"ext4": {
		"noload": "norecovery", "barrier=0": "nobarrier", "barrier=1": "barrier", "dioread_lock": "nodioread_nolock",
		"bsdgroups": "grpid", "sysvgroups": "nogrpid", "auto_da_alloc=0": "noauto_da_alloc", "auto_da_alloc=1": "auto_da_alloc",
		"no_mbcache": "nombcache", "init_itable": "init_itable=10", "iversion": "i_version",
	},
	"xfs": {"uquota": "usrquota", "quota": "usrquota", "gquota": "grpquota", "pquota": "prjquota", "qnoenforce": "uqnoenforce"},
	"btrfs": {
		"norecovery": "rescue=nologreplay", "nologreplay": "rescue=nologreplay", "discard=sync": "discard",
		"compress": "compress=zlib:3", "compress=zlib": "compress=zlib:3", "compress=zstd": "compress=zstd:3",
		"compress-force": "compress-force=zlib:3", "compress-force=zlib": "compress-force=zlib:3", "compress-force=zstd": "compress-force=zstd:3",
	},
}
