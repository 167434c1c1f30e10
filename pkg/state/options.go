package state

import (
	"maps"
	"slices"
	"strings"
)

// Same reports whether two lists of mount flags ask for the same. Their order counts
// only between options that may override each other. Of two words for one option the
// last holds. Interdependent options must come in the same order.
func (f Flags) Same(o Flags) bool {
	return f.Set == o.Set && f.Clear == o.Clear && maps.EqualFunc(f.effective(), o.effective(), slices.Equal[[]string])
}

// Beyond returns the name of an option of f that a superblock with the options
// of staged does not have, "" if there is none.
func (f Flags) Beyond(staged Flags) string {
	mine, there := f.effective(), staged.effective()
	for _, option := range f.Super {
		topic, _ := topicOf(option)
		if slices.Contains(mine[topic], option) && !slices.Contains(there[topic], option) {
			return OptionName(option)
		}
	}
	return ""
}

// effective returns the options that have an effect on a superblock, by topic.
func (f Flags) effective() map[string][]string {
	topics := map[string][]string{}
	for _, option := range f.Super {
		topic, ordered := topicOf(option)
		if !ordered {
			topics[topic] = []string{option}
		} else if have := topics[topic]; len(have) == 0 || have[len(have)-1] != option {
			topics[topic] = append(have, option)
		}
	}
	return topics
}

// interdependent holds, by topic, the options of ext4, xfs and btrfs that change what
// options of other names have set: their effect depends on the order of all of them.
var interdependent = map[string][]string{
	"checksum": {"journal_checksum", "journal_async_commit"},
	"cow":      {"datacow", "datasum", "compress", "compress-force"},
	"dioread":  {"dioread_lock", "dioread_nolock"},
	"df":       {"bsddf", "minixdf"},
	"groups":   {"grpid", "bsdgroups", "sysvgroups"},
	"inodes":   {"inode32", "inode64"},
	"stripe":   {"sunit", "swidth", "align"},
	"ssd":      {"ssd", "ssd_spread"},
	"sync":     {"sync", "async"},
	"rescue":   {"rescue", "usebackuproot", "recovery", "logreplay"},
}

// topicOf returns what an option is about. Options about one topic override each
// other: wholly, or, if ordered, in part.
func topicOf(option string) (topic string, ordered bool) {
	name, _, _ := strings.Cut(option, "=")
	name = strings.TrimPrefix(name, "no")
	if strings.Contains(name, "quota") || strings.HasSuffix(name, "qnoenforce") || name == "jqfmt" {
		return "quota", true
	}
	for topic, names := range interdependent {
		if slices.Contains(names, name) {
			return topic, true
		}
	}
	return name, false
}
